"""Verification of a split plan: its layers must give the model's outputs and gradients, with and without recomputation.

The inputs are those of the calibration. The last check recomputes the layers with dropout on. Only this check finds a
model whose forward draws other random numbers, or rounds differently, when it is repeated.
Runs on copies that share the weights. To save memory, only fingerprints of gradients are kept. To save time, gradients
of large weights in blocks are not computed: a block runs unchanged, so only its inputs can be wrong, and wrong inputs
show in the gradients of its small weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import ModelSplitError
from roundpipe.fingerprints import TOLERANCE, differing, fingerprint
from roundpipe.split.calibrate import PrivateCopy, fresh
from roundpipe.split.determinism import Forward, WithoutDropout, other_forwards, own_generators, succeeds
from roundpipe.split.layers import LayerArrangement, PlacedPlan
from roundpipe.split.plan import KeepLogits, SplitPlan
from roundpipe.split.tiling import TokenwiseSearch
from roundpipe.split.values import equal, leaves_of, tensors_of

_LARGE = 2**16  # elements; gradients of larger weights in blocks are not computed
_LARGEST = 2**20  # elements; of gradients of larger weights of embeddings and heads only sums are computed
_WIDTH = 64  # the number of columns of such sums
_PART = 2**24  # number of elements of a matrix that FloatProducts converts to float32 at a time
_HALF = (torch.bfloat16, torch.float16)


def verify(
    model: nn.Module, plan: SplitPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_grad: bool
) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Raise ModelSplitError if the layers of the plan do not compute what the model computes.

    Returns two values: a dict from the path of a block or tap to the paths of its tokenwise modules, and whether the
    head can be fused with the loss.
    """
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.random.fork_rng(devices=()))
        modes.enter_context(own_generators())
        modes.enter_context(torch.set_grad_enabled(with_grad))
        layers, copy, placed = _layers(model, plan)
        _freeze_large_weights(copy, plan.blocks)
        gradients = _Gradients(copy)
        sums = _SumsOfGradients(copy, gradients)
        if sums.is_needed:  # it takes time in every operation
            modes.enter_context(sums)
        # Without dropout the plain model and the layers must compute the same outputs and gradients.
        with WithoutDropout() as mode:
            with _drawing_as_layers_do(copy, placed):
                expected = copy(*fresh(args), **fresh(kwargs))
            with _shared_buffers_stay(layers, copy):
                got, before_last = _chained(layers, fresh(args), fresh(kwargs))
            _compare(expected, got)
            fuses = plan.head is not None and succeeds(
                "the loss can be computed without logits",
                lambda: _fused_loss_is_same(layers[-1], before_last, expected),
            )
            in_plain, in_chain = gradients.of(expected), gradients.of(got)
            _compare_gradients(in_plain, in_chain, gradients.dtypes, "split into layers")
        # With dropout the plain model draws other random numbers than the layers. So the layers are compared only with
        # their own recomputation.
        if with_grad:
            if mode.was_needed:
                got, _ = _chained(layers, fresh(args), fresh(kwargs))
                in_chain = gradients.of(got)
            _compare_recomputed(in_chain, _loss_of(got), gradients, layers, args, kwargs)
        return _find_tokenwise(copy, plan, layers, args, kwargs), fuses


def _freeze_large_weights(copy: nn.Module, blocks: frozenset[str]) -> None:
    """Turn off requires_grad of large weights in blocks.

    The smallest weight of each block, and weights that are also used outside of blocks, keep their requires_grad.
    """
    outside = {
        id(param)
        for path, module in copy.named_modules()
        if not any(f"{path}.".startswith(f"{block}.") for block in blocks)
        for param in module.parameters(recurse=False)
    }
    for path in sorted(blocks):
        params = copy.get_submodule(path).parameters()
        trained = [param for param in params if param.requires_grad and id(param) not in outside]
        for param in sorted(trained, key=torch.Tensor.numel)[1:]:  # all but the smallest
            param.requires_grad_(param.numel() <= _LARGE)


def _fused_loss_is_same(epilogue: nn.Module, travelling: Any, expected: Any) -> bool:
    """Whether the last layer gives the same loss when head and loss are fused. travelling: the last layer's input."""
    state, ledger = travelling
    with torch.no_grad():
        got = epilogue((state, dataclasses.replace(ledger, keeps_logits=KeepLogits.NEVER))).loss
    return isinstance(got, torch.Tensor) and bool((got - expected.loss).abs() <= 1e-4 * expected.loss.abs())


def _find_tokenwise(
    copy: nn.Module, plan: SplitPlan, layers: Sequence[nn.Module], args: Any, kwargs: Any
) -> dict[str, tuple[str, ...]]:
    """Return, by path of a block or tap, the paths of its tokenwise modules.

    Tests each tap, and one block of each structure. Dropout is on, so a module that draws random numbers gives other
    results when it is tested and does not count as tokenwise.
    """
    by_path = dict(copy.named_modules())
    found: dict[str, tuple[str, ...]] = {}
    by_structure: dict[Any, tuple[str, ...]] = {}
    searches: dict[str, TokenwiseSearch] = {}
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for path in {**dict.fromkeys(plan.calls), **{tap.path: None for tap in plan.taps}}:
            module = by_path[path]
            if path not in plan.calls or _structure_of(module) not in by_structure:
                by_structure.setdefault(_structure_of(module), ())
                searches[path] = TokenwiseSearch()
                stack.enter_context(searches[path].watching(module))
        _chained(layers, fresh(args), fresh(kwargs))
    for path, search in searches.items():
        found[path] = search.found()
        if path in plan.calls:
            by_structure[_structure_of(by_path[path])] = found[path]
    found |= {path: by_structure[_structure_of(by_path[path])] for path in plan.calls if path not in found}
    return {path: parts for path, parts in found.items() if parts}


def _structure_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the paths and classes of all modules inside a module. They may differ for two modules of one class."""
    return tuple((path, type(inner)) for path, inner in module.named_modules())


@contextlib.contextmanager
def _drawing_as_layers_do(copy: nn.Module, placed: PlacedPlan) -> Iterator[None]:
    """Seed torch's generator before and after each call of a block of `copy` while entered.

    The model's code then draws the same random numbers as the layers do in `_chained`.
    """
    layer_ids = iter(sorted(placed.calls))

    def seeded(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            layer_id = next(layer_ids)
            _seed(layer_id)
            value = forward(*args, **kwargs)
            _seed(layer_id + 1)
            return value

        return run

    with other_forwards((copy.get_submodule(path), seeded) for path in placed.plan.blocks):
        _seed(0)
        yield


@contextlib.contextmanager
def _shared_buffers_stay(layers: Sequence[nn.Module], copy: nn.Module) -> Iterator[None]:
    """Raise ModelSplitError if the `with` block writes to a buffer that several layers share.

    The layers would write to such a buffer in an undefined order.
    """
    num_layers_of = Counter(id(buffer) for layer in layers for buffer in set(layer.buffers()))
    shared = [(name, buffer) for name, buffer in copy.named_buffers() if num_layers_of[id(buffer)] > 1]
    versions = [buffer._version for _, buffer in shared]
    yield
    for (name, buffer), version in zip(shared, versions, strict=True):
        if buffer._version != version or copy.get_buffer(name) is not buffer:
            raise ModelSplitError(f"it writes to {name}, a buffer that several of its layers would need")


def _seed(layer_id: int) -> None:
    torch.default_generator.manual_seed(layer_id)  # not torch.manual_seed, which also seeds the GPUs' generators


def _layers(model: nn.Module, plan: SplitPlan) -> tuple[Sequence[nn.Module], nn.Module, PlacedPlan]:
    """Copy the model and split the copy as the plan says; returns the layers, the copy, and the placed plan."""
    copy = PrivateCopy(model).root
    book = _OnePlan()
    arrangement = LayerArrangement(copy, book)
    arrangement.add(plan)
    book.placed = arrangement.placed[0]
    return arrangement.layers, copy, book.placed


class _OnePlan:
    """A PlanFinder that returns the same plan for every call."""

    placed: PlacedPlan

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> PlacedPlan:
        return self.placed


def _compare(expected: Any, got: Any) -> None:
    """Raise ModelSplitError if `got`, the outputs of the layers, differ from `expected`, the outputs of the model."""
    left, right = leaves_of(expected), leaves_of(got)
    if type(expected) is not type(got) or len(left) != len(right):
        raise ModelSplitError(
            f"split into layers, it returns {type(got).__name__} with {len(right)} values instead of "
            f"{type(expected).__name__} with {len(left)}"
        )
    for a, b in zip(left, right, strict=True):
        if not equal(a, b) and not (isinstance(a, torch.Tensor) and _is_near(a, b)):
            raise ModelSplitError("split into layers, it returns other values")


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return False
    a, b = a.detach(), b.detach()
    return bool((a.double() - b.double()).abs().max() <= TOLERANCE.get(a.dtype, 0.0) * a.double().abs().max())


def _chained(layers: Sequence[nn.Module], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run all layers in one autograd graph, layer i with seed i; returns the last layer's output and its input."""
    value: Any = None
    given: Any = None
    for i, layer in enumerate(layers):
        _seed(i)
        given, value = value, layer(value) if i else layer(*args, **kwargs)
    return value, given


def _compare_recomputed(
    in_one: Mapping[str, torch.Tensor],
    loss: torch.Tensor,
    gradients: _Gradients,
    layers: Sequence[nn.Module],
    args: Any,
    kwargs: Any,
) -> None:
    """Raise ModelSplitError if recomputing layer by layer changes the loss or the gradients.

    in_one: fingerprints of the gradients when all layers run in one autograd graph. loss: the loss in this graph.
    """
    if loss.requires_grad:
        # The hooks of `gradients` collect fingerprints while `_recomputed` runs backward; `take` returns them.
        again = _recomputed(layers, fresh(args), fresh(kwargs))
        if not equal(loss, again) and not _is_near(loss, again):
            raise ModelSplitError(
                f"recomputing layer by layer changed the loss ({float(loss):.6g} -> {float(again):.6g}): the forward "
                "pass is not deterministic"
            )
        _compare_gradients(in_one, gradients.take(), gradients.dtypes, "recomputed layer by layer")


def _compare_gradients(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], how: str
) -> None:
    """Raise ModelSplitError if the fingerprints of gradients differ. how: says how `got` was computed, for messages."""
    name = differing(expected, got, dtypes)
    if name is not None:
        what = "no" if name not in got else "another" if name in expected else "a"
        raise ModelSplitError(f"{how}, {name} has {what} gradient")


class _Gradients:
    """Replaces each gradient of a model by a small fingerprint (means of chunks, and samples), to save memory."""

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, torch.Tensor] = {}
        self.dtypes = {name: param.dtype for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._note, name))

    def of(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Run backward from the outputs of a forward pass; returns the fingerprints by parameter name."""
        loss = _loss_of(outputs)
        if loss.requires_grad:
            with FloatProducts():
                loss.backward()
        return self.take()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the fingerprints of all backward passes since the last call, summed."""
        found, self._found = self._found, {}
        return found

    def _note(self, name: str, param: torch.Tensor) -> None:
        """Add the fingerprint of a parameter's gradient. Runs as a hook when the gradient is complete."""
        found, param.grad = param.grad, None
        if found is not None:  # None: all of it went to _SumsOfGradients
            self.add(name, found)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient to those of its name."""
        found = fingerprint(gradient)
        self._found[name] = self._found[name] + found if name in self._found else found


class _SumsOfGradients(TorchFunctionMode):
    """Replaces the gradients of large embeddings and heads by the sums of their columns in groups.

    A gradient has a row for each token of the vocabulary, and a trial reaches a few of them: making and comparing whole
    gradients takes seconds. Column j of the sums is the sum of all columns whose number is j modulo `_WIDTH`.
    """

    def __init__(self, model: nn.Module, gradients: _Gradients) -> None:
        super().__init__()
        self._gradients = gradients
        self._names = {
            id(param): name
            for name, param in model.named_parameters()
            if type(param) is nn.Parameter and param.requires_grad and param.numel() > _LARGEST and param.dim() == 2
        }

    @property
    def is_needed(self) -> bool:
        return bool(self._names)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        name = self._names.get(id(given.get("weight"))) if func in (F.linear, F.embedding) else None
        if name is None or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        used, weight = given["input"].detach(), given["weight"]
        if func is F.linear:
            bias = given.get("bias")
            output = F.linear(given["input"], weight.detach(), bias)
            return _Noted.apply(output, weight, partial(self._note_product, name, used))
        others = dict(zip(_OF_EMBEDDING, args[2:], strict=False)) | (kwargs or {})
        if any(others.get(option) for option in ("max_norm", "scale_grad_by_freq", "sparse")):
            return func(*args, **(kwargs or {}))
        output = F.embedding(used, weight.detach(), others.get("padding_idx"))
        return _Noted.apply(output, weight, partial(self._note_rows, name, used, others.get("padding_idx")))

    def _note_product(self, name: str, used: torch.Tensor, gradient: torch.Tensor) -> None:
        columns = _sums_of_columns(used.flatten(0, -2))
        self._add(f"{name} in a product", gradient.flatten(0, -2).float().t() @ columns, gradient.dtype)

    def _note_rows(self, name: str, ids: torch.Tensor, padding_idx: int | None, gradient: torch.Tensor) -> None:
        columns = _sums_of_columns(gradient.flatten(0, -2))
        tokens, places = ids.flatten().unique(return_inverse=True)
        rows = columns.new_zeros(len(tokens), columns.shape[1]).index_add_(0, places, columns)
        if padding_idx is not None:
            rows[tokens == padding_idx] = 0
        self._add(f"{name} in rows {tuple(rows.shape)}", rows, gradient.dtype)

    def _add(self, name: str, sums: torch.Tensor, dtype: torch.dtype) -> None:
        self._gradients.dtypes[name] = dtype
        self._gradients.add(name, sums)


_OF_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")  # after input and weight


def _sums_of_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of `_WIDTH` columns in float32: the columns of a matrix, added up in groups."""
    padded = F.pad(matrix.float(), (0, -matrix.shape[1] % _WIDTH))
    sums: torch.Tensor = padded.unflatten(1, (-1, _WIDTH)).sum(1)
    return sums


class _Noted(torch.autograd.Function):
    """Returns the output of an operation as it is, and passes its gradient to a function; none reaches the weight."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor, note: Callable[[torch.Tensor], None]) -> Any:
        ctx.note = note
        return output.clone()  # not a view: the model may write into it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note(gradients[0])
        return gradients[0], None, None


def _recomputed(layers: Sequence[nn.Module], args: Any, kwargs: Any) -> torch.Tensor:
    """Run forward, keeping only the input of each layer, then backward with recomputed layers; returns the loss."""
    # Each layer gets the same seed in its forward pass and in its recomputation, as in training.
    inputs: list[Any] = [(args, kwargs)]
    for i, layer in enumerate(layers[:-1]):
        _seed(i)
        inputs.append(_cut_off(layer(inputs[-1]) if i else layer(*args, **kwargs)))
    gradients: dict[int, torch.Tensor] | None = None
    loss = torch.zeros(())
    for i in reversed(range(len(layers))):
        _seed(i)
        given = inputs.pop()
        value = layers[i](given) if i else layers[i](*args, **kwargs)
        if gradients is None:
            loss = _loss_of(value)
            roots, of_roots = [loss], [torch.ones_like(loss)]
        else:
            found = tensors_of(list(value[0].values()))
            roots = [found[j] for j in gradients if found[j].requires_grad]
            of_roots = [gradient for j, gradient in gradients.items() if found[j].requires_grad]
        if roots:
            with FloatProducts():
                torch.autograd.backward(roots, of_roots)
        # The gradients of this layer's input are the gradients of the previous layer's output. The keys of `gradients`
        # are positions of tensors in the state. The state may hold one tensor several times.
        leaves = tensors_of(list(given[0].values())) if i else []
        first = {id(leaf): j for j, leaf in reversed(list(enumerate(leaves)))}
        found_gradients = {j: leaves[j].grad for j in first.values()}
        gradients = {j: gradient for j, gradient in found_gradients.items() if gradient is not None}
    return loss.detach()


def _cut_off(value: Any) -> Any:
    """Return a layer's output with detached tensors; a tensor that occurs twice stays one object."""
    cut: dict[int, torch.Tensor] = {}
    state, ledger = value
    for tensor in state.values():
        cut.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))
    return {key: cut[id(tensor)] for key, tensor in state.items()}, ledger


def _loss_of(value: Any) -> torch.Tensor:
    """Return the loss in a model's output. If there is none, return a scalar that depends on all outputs."""
    loss = getattr(value, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    outputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
    return torch.stack([output.float().square().mean() for output in outputs]).sum() if outputs else torch.zeros(())


class FloatProducts(TorchDispatchMode):
    """Computes products of half-precision matrices on the host in float32, a part of the matrix at a time.

    Many CPUs have no instructions for half precision. torch then takes a hundred times as long for the product of a
    gradient and a weight as for the product of an input and a weight.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype in _HALF and args[0].device.type == "cpu":
            return _product(*args)
        return func(*args, **(kwargs or {}))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right, summed over parts of the inner dimension."""
    length = max(_PART // max(right.shape[1], 1), 1)
    total = torch.zeros(left.shape[0], right.shape[1])
    for rows, columns in zip(right.split(length), left.split(length, dim=1), strict=True):
        total.addmm_(columns.float(), rows.float())
    return total.to(left.dtype)
