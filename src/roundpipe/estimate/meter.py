"""Meters a training pass without running it: seconds by a roofline, and device memory, of every operation.

The pass runs on the meta device, so it computes and allocates nothing. Each operation takes the time of its matrix
products at the device's rate, or the time to read its inputs and write its outputs, whichever is longer. The host needs
a time to launch each operation; it launches ahead, so that the longer of the two sums counts. Knows operations and
tensors, never models or plans.

[Note: kernels of a GPU] On the meta device, torch decomposes operations for which a GPU has one kernel: attention and
RMSNorm. `GpuKernels` replaces these by functions that save what the GPU's kernels save for backward and cost what they
cost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from roundpipe.errors import ConfigError
from roundpipe.estimate.figures import DeviceFigures

_aten = torch.ops.aten
# Operations that read only as many rows of their first input as they return, and those that allocate without writing.
_LOOKUPS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
_ALLOCATIONS = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.lift_fresh}
)
_MOST_OPERATIONS = 50_000  # a model with two kinds of blocks takes about 500
_FLASH_BACKWARD_FACTOR = 2.5  # five matrix products instead of two


class Meter(TorchDispatchMode):
    """Adds up the seconds and counts the device memory of all operations while it is entered."""

    def __init__(self, figures: DeviceFigures) -> None:
        super().__init__()
        self._figures = figures
        self.device_s = 0.0  # seconds in which the device computes
        self.launch_s = 0.0  # seconds in which the host launches
        self.live_bytes = 0  # of tensors that operations have made and that still exist
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}  # storages that are counted, by id
        self._num_operations = 0
        self._most_found: int | None = None  # elements that `nonzero` returns at most

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.launch_s += self._figures.launch_s
        self._num_operations += 1
        if self._num_operations > _MOST_OPERATIONS:
            raise ConfigError(
                f"a pass takes more than {_MOST_OPERATIONS:,} operations, as with a loop over tokens; on a GPU, another"
                " package does the work of the loop, in a time that is not known here"
            )
        # Two operations depend on values, which do not exist here. The answers are those of ordinary data: every
        # element counts (the worst case), and a condition that code checks before it takes a shortcut holds.
        if func is _aten.nonzero.default:
            # A limit bounds what is done with the elements that are found, not their memory.
            result = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)[: self._most_found]
        elif func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool and args[0].is_meta:
            return True
        else:
            result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {_storage_key(tensor) for tensor in inputs}
        fresh = [tensor for tensor in outputs if _storage_key(tensor) not in known]
        for tensor in fresh:
            self.count(tensor)
        packet = func.overloadpacket
        is_written = bool(fresh) or func._schema.is_mutable
        if is_written and packet not in _ALLOCATIONS:
            read = [] if packet in _LOOKUPS else inputs
            moved = sum(map(_held_bytes, read)) + sum(map(_held_bytes, outputs)) * (2 if packet in _LOOKUPS else 1)
            self.spend(_flops(packet, args, kwargs, result), moved, _dtype_of(inputs))
        return result

    @contextlib.contextmanager
    def finding_at_most(self, count: int) -> Iterator[None]:
        """Inside the block, `nonzero` returns at most `count` elements."""
        before, self._most_found = self._most_found, count
        try:
            yield
        finally:
            self._most_found = before

    def seconds_of(self, work: Callable[[], object]) -> tuple[float, float]:
        """The seconds that `work` takes on the device and the host. They, and its memory, are not added to the sums."""
        before = (self.device_s, self.launch_s, self.peak_bytes)
        work()
        seconds = (self.device_s - before[0], self.launch_s - before[1])
        self.device_s, self.launch_s, self.peak_bytes = before
        return seconds

    def spend(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> None:
        """Add the time of one kernel."""
        self.device_s += max(flops / self._figures.flops(dtype), moved_bytes / self._figures.memory_bytes_per_s)

    def attend(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> None:
        """Add the time of one attention kernel, whose products run at a lower rate."""
        self.spend(flops / self._figures.attention_efficiency, moved_bytes, dtype)

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until its storage is freed. A storage counts once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: weakref.ref[Any]) -> None:
            if self._storages.pop(key, None) is not None:
                self.live_bytes -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _held_bytes(tensor: Tensor) -> int:
    """Bytes that a kernel moves for a tensor: an expanded tensor is read from the little memory that it has."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _dtype_of(inputs: Iterable[Tensor]) -> torch.dtype:
    return next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: Any) -> float:
    if packet is _aten._grouped_mm:
        # One product per expert. If both operands are matrices, the experts divide the dimension that is summed over:
        # each element of the first operand meets one row of the second. Otherwise each output row meets one matrix.
        first, second = args[:2]
        if first.dim() == second.dim() == 2:
            return 2.0 * float(first.numel()) * float(second.shape[-1])
        return 2.0 * float(result.numel()) * float(first.shape[-1])
    count: Callable[..., float] | None = flop_registry.get(packet)
    return float(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0.0


class GpuKernels(TorchFunctionMode):
    """While entered, attention and RMSNorm cost and save what a GPU's kernels do; see [Note: kernels of a GPU]."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            is_causal = given.get("is_causal", len(args) > 5 and args[5])
            return _Attention.apply(query, key, value, bool(is_causal), self._meter)
        if func is torch.nn.functional.rms_norm:
            values = args[0] if args else given["input"]
            weight = args[2] if len(args) > 2 else given.get("weight")
            return _RmsNorm.apply(values, weight, self._meter)
        return func(*args, **given)


class _Attention(torch.autograd.Function):
    """Flash attention: saves queries, keys, values, the output and one number per row; no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, meter: Meter) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        # Two products: queries with keys, scores with values. A causal mask skips half of each.
        pairs = query[..., 0].numel() * key.shape[-2] * (0.5 if is_causal else 1.0)
        ctx.meter, ctx.flops = meter, 2.0 * pairs * (query.shape[-1] + value.shape[-1])
        ctx.moved = sum(tensor.nbytes for tensor in (query, key, value, output))
        meter.attend(ctx.flops, ctx.moved, query.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.meter.attend(_FLASH_BACKWARD_FACTOR * ctx.flops, 2 * ctx.moved, query.dtype)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


class _RmsNorm(torch.autograd.Function):
    """RMSNorm in one kernel: saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, meter: Meter) -> Tensor:
        ctx.meter, ctx.has_weight = meter, weight is not None
        scales = values.new_empty(values.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(values, scales, *([] if weight is None else [weight]))
        meter.spend(0.0, 2 * values.nbytes, values.dtype)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values = ctx.saved_tensors[0]
        ctx.meter.spend(0.0, 3 * values.nbytes, values.dtype)
        weight_grad = torch.empty_like(ctx.saved_tensors[2]) if ctx.has_weight else None
        return torch.empty_like(values), weight_grad, None
