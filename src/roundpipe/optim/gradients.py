"""Clipping and unscaling of an optimizer's gradients, without a float32 copy of all gradients at once.

The pending gradient of a master, which lies in host memory in low precision, is only read: the factor is added
to the copy's `factors`, and the optimizer multiplies the gradient by it later. torch changes all other gradients in
place. Knows optimizers and their parameters, never a model, an iteration or a
scaler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from roundpipe.errors import ArgumentTypeError, ConfigError, NonFiniteError, UsageError
from roundpipe.optim.native.kernel import can_read, one_pass_kernel, share_layout
from roundpipe.store import OptimizerCopy
from roundpipe.store.surroundings import StepExchange
from roundpipe.store.update import summed


def pending_copies(params: Iterable[Any]) -> list[OptimizerCopy]:
    """The masters among `params` whose gradient is pending: not yet converted to a tensor in `.grad`."""
    return [param for param in params if isinstance(param, OptimizerCopy) and param.has_only_low_gradient]


def _own_precision(copy: OptimizerCopy) -> Tensor | None:
    """The pending gradient of a master in the dtype of the master, or None; the caller must not change it.

    With several machines this is the sum over all of them, in this machine's range alone and flat.
    """
    assert copy.source is not None
    copy.source.note_reading()
    sources = copy.gradient_sources()
    if sources is None:
        return None
    values = sources[0].to(copy.dtype)
    if len(sources) > 1 or copy.factors:
        values = values.clone(memory_format=torch.preserve_format) if values is sources[0] else values
    for more in sources[1:]:
        values.add_(more)
    for factor in copy.factors:
        values.mul_(factor)
    return values


# Sums of squares. [Note: the norm while gradients land]
#
# The norm and the check for infinity and NaN need one number of each gradient: the sum of its squares in double
# precision, which is not finite if and only if an element of a float32 or smaller gradient is not. The C library reads
# it from the dtype in which the gradient landed, layer by layer in the order of landing, so that only the last layer is
# left when the backward ends. The order of additions is fixed: one number for any number of devices and threads.


def _squares(copies: Sequence[OptimizerCopy]) -> dict[int, float]:
    """The sum of squares of each copy's pending gradient, by id; copies without a gradient are left out.

    Waits for the gradients from the last copy to the first. With several machines: in this machine's range.
    """
    found: dict[int, float] = {}
    for _, of_layer in itertools.groupby(reversed(copies), key=lambda copy: id(copy.source)):
        for copy, squares in _squares_of_source(list(of_layer)):
            found[id(copy)] = squares * math.prod(copy.factors) ** 2
    return found


def _squares_of_source(copies: Sequence[OptimizerCopy]) -> list[tuple[OptimizerCopy, float]]:
    """The sums of squares of copies that have one source, which keeps them if its gradients cannot change."""
    assert copies[0].source is not None
    copies[0].source.note_reading()
    known = copies[0].source.known_squares()
    new = [(copy, copy.gradient_sources()) for copy in copies if copy.record not in known]
    present = [(copy, parts) for copy, parts in new if parts is not None]
    sums = _squares_of_tensors([parts for _, parts in present])
    known.update((copy.record, value) for (copy, _), value in zip(present, sums, strict=True))
    return [(copy, known[copy.record]) for copy in copies if copy.record in known]


def _squares_of_tensors(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    """The sum of squares of each gradient, which is the sum of one or several tensors."""
    kernel = one_pass_kernel()
    if kernel is not None and all(map(_is_for_kernel, gradients)):
        return kernel.squares(gradients)
    return [_squares_in_torch(parts) for parts in gradients]


def _is_for_kernel(parts: Sequence[Tensor]) -> bool:
    is_strided = parts[0].device.type == "cpu" and parts[0].layout is torch.strided
    return is_strided and can_read(parts[0]) and share_layout(parts)


_PIECE = 32_768  # elements that torch adds on one thread


def _squares_in_torch(parts: Sequence[Tensor]) -> float:
    """As OnePassKernel.squares, for gradients that the kernel cannot read; does not depend on the threads either."""
    total = summed(parts).double().flatten()
    return math.fsum(float(piece.square().sum()) for piece in total.split(_PIECE))


# Clipping of gradients.


@runtime_checkable
class HasOptimParameters(Protocol):
    """A model with masters; the gradients to clip are those of the copies."""

    def optim_parameters(self) -> Iterable[Tensor]: ...


def clip_grad_norm_(
    model_or_params: HasOptimParameters | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients down so that their total norm is at most `max_norm`; returns the norm before clipping.

    Gives the same bits as `torch.nn.utils.clip_grad_norm_`, unless gradients land in lower precision than their
    masters: then the 2-norm is added up in double precision. `max_norm=float("inf")` only measures the norm. With a
    GradScaler, call `scaler.unscale_(optimizer)` first. `error_if_nonfinite`: if the norm is infinite or NaN, raise
    NonFiniteError, which names the parameters, and change no gradient.
    """
    _check_positive("max_norm", max_norm)
    _check_positive("norm_type", norm_type)
    params = _gradient_owners(model_or_params)
    for exchange in _exchanges_of(params):  # with other arguments on one machine, the factors would differ
        arguments = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        exchange.require_equal("clip_grad_norm_()", arguments, _record_names(params))
    pending = pending_copies(params)
    in_double = norm_type == 2.0 and any(isinstance(param, OptimizerCopy) and param.is_wider for param in params)
    # A pending gradient is still in the dtype in which it landed. If only some gradients are pending, torch's function
    # clips all of them: it reads `.grad`, which converts pending gradients to the dtype of the master.
    are_alike = len(pending) == len(params) and len({copy.dtype for copy in pending}) == 1
    if not params or not (in_double or are_alike):
        return _clip_by_torch(model_or_params, params, max_norm, norm_type, error_if_nonfinite)
    converted = [] if len(pending) == len(params) else _with_gradient(params, pending)
    norm = _norm_in_double(pending, converted) if in_double else _norm_of_pending(pending, float(norm_type))
    if norm is None:
        return _clip_by_torch(model_or_params, params, max_norm, norm_type, error_if_nonfinite)
    if error_if_nonfinite and not norm.isfinite():
        position = {id(param): at for at, param in enumerate(params)}
        values = [*((copy, _own_precision(copy)) for copy in pending), *((param, param.grad) for param in converted)]
        found = ((position[id(param)], gradient) for param, gradient in values if gradient is not None)
        raise _nonfinite_error(model_or_params, params, found)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for copy in pending:
        copy.scale_gradient(float(factor))
    for param in converted:
        assert param.grad is not None
        param.grad.detach().mul_(factor.to(param.grad.device))
    return norm


def _clip_by_torch(
    model_or_params: Any, params: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    try:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    except RuntimeError:
        found = [(at, param.grad) for at, param in enumerate(params) if param.grad is not None]
        if not error_if_nonfinite or _norm_is_finite([gradient for _, gradient in found], norm_type):
            raise
    raise _nonfinite_error(model_or_params, params, found)


def _with_gradient(params: Sequence[Tensor], pending: Sequence[OptimizerCopy]) -> list[Tensor]:
    """The parameters whose gradient is a tensor in `.grad`."""
    are_pending = set(map(id, pending))
    return [param for param in params if id(param) not in are_pending and param.grad is not None]


@torch.no_grad()
def _norm_in_double(pending: Sequence[OptimizerCopy], converted: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm from sums of squares in double precision, in float32. None without gradients.

    pending: masters with a pending gradient. converted: parameters with a gradient in `.grad`.
    """
    squares = _squares(pending)
    parts = _of_all_machines([copy for copy in pending if id(copy) in squares], squares, math.fsum)
    parts += _squares_of_tensors([[param.grad] for param in converted if param.grad is not None])
    return torch.tensor(math.sqrt(math.fsum(parts)), dtype=torch.float32) if parts else None


@torch.no_grad()
def _norm_of_pending(copies: list[OptimizerCopy], norm_type: float) -> Tensor | None:
    """The total norm as torch computes it, bit for bit, without converting the gradients to `.grad`.

    None without gradients.
    """
    # Norms are computed in the order in which gradients land, but stacked in the order of parameters as in torch: the
    # rounding of the total norm depends on the order.
    gradients = ((copy, _own_precision(copy)) for copy in reversed(copies))
    norms = {id(copy): _norm_of(values, norm_type) for copy, values in gradients if values is not None}

    def norm_of(parts: Sequence[float]) -> float:
        return float(torch.linalg.vector_norm(torch.tensor(parts, dtype=copies[0].dtype), norm_type))

    of_ranges = {key: float(norm) for key, norm in norms.items()}
    in_order = _of_all_machines([copy for copy in copies if id(copy) in norms], of_ranges, norm_of)
    return torch.linalg.vector_norm(torch.tensor(in_order, dtype=copies[0].dtype), norm_type) if in_order else None


def _of_all_machines(
    copies: Sequence[OptimizerCopy], values: Mapping[int, float], combine: Callable[[Sequence[float]], float]
) -> list[float]:
    """The value of each copy, from the values of the ranges of all machines; `values`: this machine's, by id."""
    found = [values[id(copy)] for copy in copies]
    for exchange in _exchanges_of(copies):
        at = [i for i, copy in enumerate(copies) if _exchanges_of([copy]) == [exchange]]
        of_ranks = exchange.numbers("the norm of the gradients", [found[i] for i in at])
        for i, parts in zip(at, zip(*of_ranks, strict=True), strict=True):
            found[i] = combine(parts)
    return found


def _norm_of(values: Tensor, norm_type: float) -> Tensor:
    """The norm of a gradient. It is 0 for a range without elements, of which torch computes no infinity norm."""
    return torch.linalg.vector_norm(values, norm_type) if values.numel() else values.new_zeros(())


def _exchanges_of(params: Iterable[Any]) -> list[StepExchange]:
    """The exchanges with other machines that the gradients of copies need, each once, in the order of `params`."""
    sources = [param.source for param in params if isinstance(param, OptimizerCopy)]
    found = {id(source.exchange): source.exchange for source in sources if source is not None}
    return [exchange for exchange in found.values() if exchange is not None]


def _record_names(params: Iterable[Any]) -> list[str]:
    """The names of parameters in the user's model; empty for one that is not in a step."""
    records = [getattr(param, "record", None) for param in params]
    return ["" if record is None else record.name for record in records]


@torch.no_grad()
def _norm_is_finite(gradients: Sequence[Tensor], norm_type: float) -> bool:
    norms = [torch.linalg.vector_norm(gradient, norm_type).to("cpu") for gradient in gradients]
    return not norms or bool(torch.linalg.vector_norm(torch.stack(norms), norm_type).isfinite())


_MOST_NAMED = 5  # parameters that an error names at most


def _nonfinite_error(
    model_or_params: Any, params: Sequence[Tensor], gradients: Iterable[tuple[int, Tensor]]
) -> NonFiniteError:
    """The error for a norm that is not finite. It names the parameters whose gradients are not finite.

    gradients: each with the position of its parameter.
    """
    largest = [(float(gradient.abs().max()), at) for at, gradient in gradients if gradient.numel()]
    # The last ones first: a gradient that is not finite makes those of all earlier layers so.
    bad = sorted((at for value, at in largest if not math.isfinite(value)), reverse=True)
    names = _names(model_or_params, params)
    if bad:
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        named = ", ".join(names[at] for at in bad[:_MOST_NAMED]) + more
        found = f"{len(bad)} of {len(largest)} gradients contain infinity or NaN: those of {named}"
    elif not largest:
        found = "this machine has no range of any gradient, others do"
    else:
        value, at = max(largest)
        found = f"every gradient is finite, but the norm overflows: that of {names[at]} has values up to {value:.3g}"
    return NonFiniteError(
        f"the total norm of the gradients is non-finite; {found}. No gradient was changed. To go on, drop these "
        "gradients and skip the step; to find the cause, check the batch, the learning rate and the loss scale."
    )


def _names(model_or_params: Any, params: Sequence[Tensor]) -> list[str]:
    """What an error calls each parameter: its name in the user's model, or its position if the name is not known."""
    known: dict[int, str] = {}
    if hasattr(model_or_params, "optim_named_parameters"):
        known = {id(param): name for name, param in model_or_params.optim_named_parameters()}
    # A copy knows its record while it has a gradient source: in steps, and while gradients are viewed.
    records = [getattr(param, "record", None) for param in params]
    known |= {id(param): record.name for param, record in zip(params, records, strict=True) if record is not None}
    return [
        repr(known[id(param)]) if id(param) in known else f"parameter {at} of shape {tuple(param.shape)}"
        for at, param in enumerate(params)
    ]


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"clip_grad_norm_() got {name}={value!r} of type {type(value).__name__}; pass a number."
        )
    if not float(value) > 0.0:
        raise ConfigError(f"clip_grad_norm_() got {name}={value!r}; pass a number greater than 0.")


def _gradient_owners(model_or_params: Any) -> list[Tensor]:
    """The tensors whose `.grad` is to be clipped."""
    if isinstance(model_or_params, Tensor):
        return [model_or_params]
    if isinstance(model_or_params, HasOptimParameters):
        return list(model_or_params.optim_parameters())
    if not isinstance(model_or_params, Iterable):
        raise ArgumentTypeError(
            f"clip_grad_norm_() got a {type(model_or_params).__name__}, which has no optim_parameters() and is not "
            "iterable; pass a RoundPipe model, a tensor, or an iterable of tensors such as module.parameters()."
        )
    params = list(model_or_params)
    for position, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise ArgumentTypeError(
                f"clip_grad_norm_() got a {type(model_or_params).__name__} whose element {position} is a "
                f"{type(param).__name__}, not a tensor; pass an iterable of tensors such as module.parameters()."
            )
    return params


# Unscaling of gradients.

_UNSCALABLE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def unscale(optimizer: torch.optim.Optimizer, inverse_scale: float) -> bool:
    """Multiply every gradient by `inverse_scale`, rounded to float32. Returns whether any element is not finite.

    If a gradient cannot be unscaled, raises UsageError before it changes any gradient.
    """
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    pending = [copy for copy in pending_copies(params.values()) if copy.dtype in _UNSCALABLE_DTYPES]
    for exchange in _exchanges_of(params.values()):
        exchange.require_equal("unscale_()", {"1 / scale of the losses": inverse_scale}, _record_names(params.values()))
    others = [param for key, param in params.items() if key not in {id(copy) for copy in pending}]
    # First the gradients that may raise UsageError; pending gradients of copies never do.
    found_inf = unscale_in_place(dense_gradients(others), inverse_scale)
    return _unscale_pending(pending, inverse_scale) or found_inf


def _unscale_pending(copies: Sequence[OptimizerCopy], inverse_scale: float) -> bool:
    """Unscale pending gradients: add the factor to each copy. Returns whether any element is not finite."""
    factor = float(torch.full((), inverse_scale, dtype=torch.float32))  # rounded as torch rounds it
    found_inf = not all(_is_finite(copies))
    for copy in copies:
        copy.scale_gradient(factor)
    for exchange in _exchanges_of(copies):
        of_ranks = exchange.numbers("whether gradients are finite", [float(found_inf)])
        found_inf = any(flag for (flag,) in of_ranks)
    return found_inf


def _is_finite(copies: Sequence[OptimizerCopy]) -> Iterator[bool]:
    """For each pending gradient, whether all of its elements are finite."""
    # The square of a finite float64 number may overflow.
    wide = [copy for copy in copies if copy.record.weights.dtype is torch.float64]
    others = [copy for copy in copies if copy.record.weights.dtype is not torch.float64]
    values = (_own_precision(copy) for copy in reversed(wide))
    yield from (bool(gradient.isfinite().all()) for gradient in values if gradient is not None)
    yield from map(math.isfinite, _squares(others).values())


def dense_gradients(params: Iterable[Any]) -> list[Tensor]:
    """The gradients of those parameters that have one. A sparse gradient is coalesced, and its values are returned.

    Raises UsageError for a gradient that cannot be unscaled.
    """
    with_grad = [param for param in params if param.grad is not None]
    for param in with_grad:
        _check_can_unscale(param.grad)
    return [_coalesced_values(param) if param.grad.is_sparse else param.grad for param in with_grad]


def _check_can_unscale(grad: Tensor) -> None:
    if grad.dtype is torch.float16:
        raise UsageError(
            f"GradScaler cannot unscale float16 gradients (shape {tuple(grad.shape)}): small ones would vanish. Wrap "
            "the model with RoundPipe(model, optim_dtype=torch.float32), so that the optimizer sees float32 ones."
        )
    if grad.dtype not in _UNSCALABLE_DTYPES or grad.layout not in (torch.strided, torch.sparse_coo):
        raise UsageError(
            f"GradScaler cannot unscale a gradient of {grad.dtype} and {grad.layout} (shape {tuple(grad.shape)}); it "
            "takes bfloat16, float32 and float64 ones, strided or sparse COO."
        )


def _coalesced_values(param: Tensor) -> Tensor:
    """Coalesce a sparse gradient and return its values.

    Coalescing adds duplicate entries. Only their sums show whether the gradient is finite.
    """
    assert param.grad is not None
    param.grad = param.grad.coalesce()
    return param.grad._values()


def unscale_in_place(grads: Iterable[Tensor], inverse_scale: float) -> bool:
    """Multiply gradients in place by `inverse_scale`, rounded to float32. Returns whether any element is not finite."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    found_infs = []
    with torch.no_grad():
        for (device, _), kind_grads in by_kind.items():
            found_infs.append(torch.zeros((), dtype=torch.float32, device=device))
            factor = torch.full((), inverse_scale, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(kind_grads, found_infs[-1], factor)
    return any(found_inf.item() != 0.0 for found_inf in found_infs)
