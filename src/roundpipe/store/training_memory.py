"""The host memory that training a model will take, by what it is for, known before any of it is taken.

Called by the store and by api when a model is wrapped. Looks at sizes only, so a model on the meta device will do.

[Note: what is counted] The rows are what has yet to be taken: weights that lie in memory already are not among them.
The optimizer is not known when a model is wrapped; the state counted is Adam's, two moments in the precision of the
optimizer's copies. The optimizer checks its state again, exactly, before it makes any of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from roundpipe.store.adoption import PinMode
from roundpipe.store.host_memory import require_host_memory

SECOND_WEIGHTS = "second weights of asynchronous steps"
_NUM_MOMENTS = 2
_ADVICE = (
    "Weights that are in memory already are not counted, and the optimizer's state is that of Adam. Free memory, train "
    "fewer parameters (requires_grad_(False) before wrapping: a frozen parameter takes its weight only), use a lower "
    'precision, pass pin_model="off" for memory-mapped weights, or wrap inside torch.no_grad() for inference alone.'
)
_ASYNC_ADVICE = "Step with is_async=False: exact steps fit."


def training_memory(
    layers: Sequence[nn.Module], optim_dtype: torch.dtype | None, mode: PinMode, *, trains: bool = True
) -> dict[str, int]:
    """Bytes that have yet to be taken, by name; only SECOND_WEIGHTS is not needed by exact steps.

    trains: False for inference, which takes weights and buffers only.
    """
    params = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    buffers = list({id(b): b for layer in layers for b in layer.buffers()}.values())
    trainable = [p for p in params if p.requires_grad] if trains else []
    sizes = [p.numel() * (optim_dtype or p.dtype).itemsize for p in trainable]
    files = _MappedFiles()
    is_written = {id(p) for p in trainable}
    new = [p for p in (*params, *buffers) if p.is_meta]
    new += [p for p in params if files.hold(p) and (mode is not PinMode.OFF or id(p) in is_written)]
    rows = {
        "weights": sum(p.nbytes for p in new),
        "buffers, as calls read them": sum(b.nbytes for b in buffers),
        "gradients": sum(p.nbytes for p in trainable),
        "optimizer copies": sum(_copy_bytes(p, optim_dtype or p.dtype) for p in trainable),
        "optimizer state (Adam)": _NUM_MOMENTS * sum(sizes),
    }
    # Weights are moved before anything else is taken: only what exceeds all that comes later is a need of its own.
    later = sum(rows.values()) - rows["weights"]
    rows["weights while they move"] = max(0, _moving_bytes(layers, files) - later) if mode is PinMode.ALLOC else 0
    rows[SECOND_WEIGHTS] = sum(p.nbytes for p in trainable)
    return rows


def require_training_memory(
    layers: Sequence[nn.Module],
    optim_dtype: torch.dtype | None,
    mode: PinMode,
    *,
    trains: bool = True,
    warns_of_async: bool = True,
) -> None:
    """Raise HostMemoryError with a table if exact steps cannot fit; warn with it if only asynchronous ones cannot."""
    needs = training_memory(layers, optim_dtype, mode, trains=trains)
    second = needs.pop(SECOND_WEIGHTS)
    require_host_memory(
        needs,
        "training this model" if trains else "this model",
        _ADVICE,
        async_needs={SECOND_WEIGHTS: second} if warns_of_async else {},
        async_advice=_ASYNC_ADVICE,
    )


def _copy_bytes(param: nn.Parameter, dtype: torch.dtype) -> int:
    """A float32 copy of a bfloat16 weight shares the upper half of each number with it: see SplitValue."""
    shared = param.nbytes if param.dtype is torch.bfloat16 and dtype is torch.float32 else 0
    return param.numel() * dtype.itemsize - shared


def _moving_bytes(layers: Sequence[nn.Module], files: _MappedFiles) -> int:
    """The most memory that weights take on their way, layer by layer, beyond what they take before or after it.

    Memory that several layers share is free only when the last of them has moved. Mapped files take no memory.
    """
    last_use: dict[int, int] = {}
    layer_params: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for layer_id, layer in enumerate(layers):
        layer_params.append([p for p in layer.parameters() if id(p) not in seen and not files.hold(p)])
        for param in layer_params[-1]:
            seen.add(id(param))
            last_use[_memory(param)] = layer_id
    waiting: dict[int, int] = {}  # bytes that have moved, by the old memory they came from
    extra = most = 0
    for layer_id, params in enumerate(layer_params):
        extra += sum(p.nbytes for p in params)
        most = max(most, extra)
        for param in params:
            waiting[_memory(param)] = waiting.get(_memory(param), 0) + param.nbytes
        extra -= sum(waiting.pop(memory) for memory in list(waiting) if last_use[memory] == layer_id)
    return most


def _memory(param: nn.Parameter) -> int:
    """What identifies the memory of a tensor; one on the meta device will get memory of its own."""
    return id(param) if param.is_meta else param.untyped_storage().data_ptr()


class _MappedFiles:
    """Addresses at which files are mapped: tensors there take no memory until they are copied or written."""

    def __init__(self) -> None:
        ranges = sorted(_mapped_files())
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def hold(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.nbytes:
            return False
        place = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        return place >= 0 and tensor.data_ptr() < self._ends[place]


def _mapped_files() -> Iterator[tuple[int, int]]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and not path[0].startswith(("/dev/", "/memfd:")):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)
