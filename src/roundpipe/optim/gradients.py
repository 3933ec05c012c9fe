"""Clipping and unscaling of an optimizer's gradients, without a float32 copy of all gradients at once.

The pending gradient of a master, which lies in host memory in low precision, is only read: the factor is added
to the copy's `factors`, and the optimizer multiplies the gradient by it later. torch changes all other gradients in
place. Results equal torch's, bit for bit. Knows optimizers and their parameters, never a model, an iteration or a
scaler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from roundpipe.errors import ArgumentTypeError, ConfigError, NonFiniteError, UsageError
from roundpipe.store import OptimizerCopy
from roundpipe.store.surroundings import StepExchange


def pending_copies(params: Iterable[Any]) -> list[OptimizerCopy]:
    """The masters among `params` whose gradient is pending: not yet converted to a tensor in `.grad`."""
    return [param for param in params if isinstance(param, OptimizerCopy) and param.has_only_low_gradient]


def widened(copies: Sequence[OptimizerCopy]) -> Iterator[tuple[OptimizerCopy, Tensor]]:
    """Iterate over the copies that have a gradient; yields (copy, its gradient in the dtype of the copy).

    All gradients are converted into the same memory, so each is valid only until the next one. Iterates from the last
    copy to the first, the order in which gradients land. With several machines each gradient is the sum over all of
    them, in this machine's range alone and flat.
    """
    scratch = torch.empty(0)
    for copy in reversed(copies):
        sources = copy.gradient_sources()
        if sources is None:
            continue
        low = sources[0]
        if scratch.numel() < low.numel() or scratch.dtype is not copy.dtype:
            scratch = torch.empty(low.numel(), dtype=copy.dtype)
        values = scratch[: low.numel()].as_strided(low.shape, low.stride())
        values.copy_(low)
        for more in sources[1:]:
            values.add_(more)
        for factor in copy.factors:
            values.mul_(factor)
        yield copy, values


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

    Gives the same bits as `torch.nn.utils.clip_grad_norm_`. `max_norm=float("inf")` only measures the norm. With a
    GradScaler, call `scaler.unscale_(optimizer)` first. `error_if_nonfinite`: if the norm is infinite or NaN, raise
    NonFiniteError, which names the parameters, and change no gradient.
    """
    _check_positive("max_norm", max_norm)
    _check_positive("norm_type", norm_type)
    params = _gradient_owners(model_or_params)
    pending = pending_copies(params)
    for exchange in _exchanges_of(params):  # with other arguments on one machine, the factors would differ
        arguments = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        exchange.require_equal("clip_grad_norm_()", arguments, _record_names(params))
    # A pending gradient is still in the dtype in which it landed. If only some gradients are pending, torch's function
    # clips all of them: it reads `.grad`, which converts pending gradients to the dtype of the master.
    if pending and len(pending) == len(params) and len({copy.dtype for copy in pending}) == 1:
        norm = _pending_norm(pending, float(norm_type))
        if norm is not None:
            if error_if_nonfinite and not norm.isfinite():
                position = {id(param): at for at, param in enumerate(params)}
                gradients = ((position[id(copy)], values) for copy, values in widened(pending))
                raise _nonfinite_error(model_or_params, params, gradients)
            factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
            for copy in pending:
                copy.scale_gradient(float(factor))
            return norm
    try:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    except RuntimeError:
        found = [(at, param.grad) for at, param in enumerate(params) if param.grad is not None]
        if not error_if_nonfinite or _norm_is_finite([gradient for _, gradient in found], norm_type):
            raise
    raise _nonfinite_error(model_or_params, params, found)


@torch.no_grad()
def _pending_norm(copies: list[OptimizerCopy], norm_type: float) -> Tensor | None:
    """The total norm as torch computes it, without converting the gradients to tensors. None without gradients."""
    # Norms are computed in the order in which gradients land, but stacked in the order of parameters as in torch: the
    # rounding of the total norm depends on the order.
    norms = {id(copy): torch.linalg.vector_norm(values, norm_type) for copy, values in widened(copies)}
    in_order = [norms[id(copy)] for copy in copies if id(copy) in norms]
    for exchange in _exchanges_of(copies):  # the norms so far are those of this machine's ranges
        present = [copy for copy in copies if id(copy) in norms]
        at = [i for i, copy in enumerate(present) if _exchanges_of([copy]) == [exchange]]
        of_ranks = exchange.numbers("the norm of the gradients", [float(in_order[i]) for i in at])
        for i, parts in zip(at, zip(*of_ranks, strict=True), strict=True):
            in_order[i] = torch.linalg.vector_norm(torch.tensor(parts, dtype=in_order[i].dtype), norm_type)
    return torch.linalg.vector_norm(torch.stack(in_order), norm_type) if in_order else None


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


_MOST_NAMED = 5  # an error names at most so many parameters


def _nonfinite_error(
    model_or_params: Any, params: Sequence[Tensor], gradients: Iterable[tuple[int, Tensor]]
) -> NonFiniteError:
    """The error for a norm that is not finite. It names the parameters whose gradients are not finite.

    gradients: each with the position of its parameter. Each is valid only until the next one, see `widened`.
    """
    largest = [(float(gradient.abs().max()), at) for at, gradient in gradients if gradient.numel()]
    # The last ones first: a gradient that is not finite makes those of all earlier layers so.
    bad = sorted((at for value, at in largest if not math.isfinite(value)), reverse=True)
    names = _names(model_or_params, params)
    if bad:
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        named = ", ".join(names[at] for at in bad[:_MOST_NAMED]) + more
        found = f"{len(bad)} of {len(largest)} gradients contain infinity or NaN: those of {named}"
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
    found_inf = False
    for copy, values in widened(copies):
        found_inf |= unscale_in_place([values], inverse_scale)
        copy.scale_gradient(factor)
    for exchange in _exchanges_of(copies):
        of_ranks = exchange.numbers("whether gradients are finite", [float(found_inf)])
        found_inf = any(flag for (flag,) in of_ranks)
    return found_inf


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
