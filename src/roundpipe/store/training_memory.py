"""Checks that training a model fits into host memory, before any of it is taken. Knows no store.

[Note: training memory] The table of training memory counts memory that is still to be allocated, not weights that are
in memory already. It needs sizes only, so that a model on the meta device can be checked before it is loaded. The
optimizer is not known yet, so the table assumes that of `assumed_optimizer`. The optimizer checks the memory for its
actual state before it allocates any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import nn

from roundpipe.store.forms import SMALLEST, form_of
from roundpipe.store.host_memory import MappedFiles, require_host_memory


class PinMode(enum.Enum):
    """Whether and how the weights are pinned when a model is wrapped."""

    ALLOC = "alloc"  # weights are moved into new, pinned memory
    REGISTER = "register"  # weights stay in their memory, which is pinned
    OFF = "off"  # weights stay in their memory, which is not pinned


SECOND_WEIGHTS = "second weights of asynchronous steps"
_MEMORY_ADVICE = (
    "Weights that are in memory already are not counted, and the optimizer's state is that of {}. Free memory, train "
    "fewer parameters (requires_grad_(False) before wrapping: a frozen parameter takes its weight only), use a lower "
    'precision, pass pin_model="off" for memory-mapped weights, or wrap inside torch.no_grad() for inference alone.'
)
_ASYNC_ADVICE = "Step with is_async=False: exact steps fit."


@dataclasses.dataclass(frozen=True)
class PaperOptimizer:
    """What the table of training memory knows of an optimizer."""

    name: str
    num_states: int  # states of the size of a master, per master
    moments: str = "float32"  # how they are stored
    is_on_disk: bool = False  # whether they lie in files

    @property
    def row(self) -> str:
        """The name of its row."""
        form = "" if self.moments == "float32" else f", {self.moments}"
        return f"optimizer state ({self.name}{form})"

    def state_bytes(self, params: Iterable[torch.Tensor], optim_dtype: torch.dtype | None) -> int:
        """Bytes of the states of the masters of parameters."""
        found = 0
        for param in params:
            count, dtype = param.numel(), optim_dtype or param.dtype
            is_low = count >= SMALLEST and dtype is torch.float32
            form = form_of(self.moments if is_low else "float32", is_square=False)
            found += self.num_states * form.num_bytes(count, dtype)
        return found


_ADAM = PaperOptimizer("Adam", num_states=2)
_assumed: ContextVar[PaperOptimizer | None] = ContextVar("assumed_optimizer", default=None)


def assumed_optimizer() -> PaperOptimizer:
    """What is counted where no optimizer is known yet."""
    return _assumed.get() or _ADAM


@contextlib.contextmanager
def assumed_state(moments: str, *, is_on_disk: bool) -> Iterator[None]:
    """Inside, models are wrapped for an optimizer with this state: checks of memory count its bytes."""
    token = _assumed.set(dataclasses.replace(_ADAM, moments=moments, is_on_disk=is_on_disk))
    try:
        yield
    finally:
        _assumed.reset(token)


def training_memory(
    layers: Sequence[nn.Module],
    optim_dtype: torch.dtype | None,
    mode: PinMode,
    *,
    trains: bool = True,
    num_machines: int = 1,
    optimizer: PaperOptimizer | None = None,
    master_bits: int = 32,
    mapped_bytes: int = 0,
) -> dict[str, int]:
    """Bytes that training will still allocate, by purpose. Only asynchronous steps need the row SECOND_WEIGHTS.

    `trains`: False for inference, which needs weights and buffers only. `num_machines`: the machines that divide
    masters and optimizer state between them. `optimizer`: by default `assumed_optimizer`. `master_bits`: of float32
    masters of bfloat16 weights. `mapped_bytes`: of weights on the meta device that will lie in mapped files.
    """
    optimizer = optimizer or assumed_optimizer()
    params = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    buffers = list({id(b): b for layer in layers for b in layer.buffers()}.values())
    trainable = [p for p in params if p.requires_grad] if trains else []
    states = 0 if optimizer.is_on_disk else optimizer.state_bytes(trainable, optim_dtype)
    files = MappedFiles()
    # Weights in memory-mapped files take memory only when they are moved, pinned or written.
    is_written = {id(p) for p in trainable}
    new = [p for p in (*params, *buffers) if p.is_meta]
    new += [p for p in params if files.hold(p) and (mode is not PinMode.OFF or id(p) in is_written)]
    rows = {
        "weights": sum(p.nbytes for p in new) - mapped_bytes,
        "buffers, as calls read them": sum(b.nbytes for b in buffers),
        "gradients": sum(p.nbytes for p in trainable),
        "master weights": sum(_copy_bytes(p, optim_dtype or p.dtype, master_bits) for p in trainable) // num_machines,
        optimizer.row: states // num_machines,
    }
    # Weights are moved before anything else is allocated. So the extra memory for moving, which is free again
    # afterwards, counts only as far as it exceeds the memory that is allocated later.
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
    is_async: bool = False,
    available: int | None = None,
    num_machines: int = 1,
    optimizer: PaperOptimizer | None = None,
    master_bits: int = 32,
    mapped_bytes: int = 0,
) -> None:
    """Raise HostMemoryError with a table if synchronous steps do not fit; warn if only asynchronous steps do not.

    `is_async`: raise also if only asynchronous steps do not fit. `available`: bytes of host memory; by default those
    of this machine. `num_machines`, `optimizer`, `master_bits`, `mapped_bytes`: see `training_memory`.
    """
    optimizer = optimizer or assumed_optimizer()
    needs = training_memory(
        layers,
        optim_dtype,
        mode,
        trains=trains,
        num_machines=num_machines,
        optimizer=optimizer,
        master_bits=master_bits,
        mapped_bytes=mapped_bytes,
    )
    second = 0 if is_async else needs.pop(SECOND_WEIGHTS)
    require_host_memory(
        needs,
        "training this model" if trains else "this model",
        _MEMORY_ADVICE.format(optimizer.name),
        async_needs={SECOND_WEIGHTS: second} if warns_of_async and second else {},
        async_advice=_ASYNC_ADVICE,
        available=available,
    )


def _copy_bytes(param: nn.Parameter, dtype: torch.dtype, bits: int) -> int:
    """Bytes of a parameter's master. A float32 copy shares its upper 16 bits with a bfloat16 weight."""
    if param.dtype is torch.bfloat16 and dtype is torch.float32:
        return param.numel() * (bits // 8 - 2)
    return param.numel() * dtype.itemsize


def _moving_bytes(layers: Sequence[nn.Module], files: MappedFiles) -> int:
    """Peak of the extra bytes that exist while weights are moved layer by layer, because some weights exist twice.

    Old memory that several layers share is freed when the last of these layers was moved. Weights in mapped files are
    not counted, because the files take no memory.
    """
    last_use: dict[int, int] = {}
    layer_params: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for layer_id, layer in enumerate(layers):
        layer_params.append([p for p in layer.parameters() if id(p) not in seen and not files.hold(p)])
        for param in layer_params[-1]:
            seen.add(id(param))
            last_use[_memory(param)] = layer_id
    waiting: dict[int, int] = {}  # bytes moved out of old memory that is not freed yet, by that memory
    extra = most = 0
    for layer_id, params in enumerate(layer_params):
        extra += sum(p.nbytes for p in params)
        most = max(most, extra)
        for param in params:
            waiting[_memory(param)] = waiting.get(_memory(param), 0) + param.nbytes
        extra -= sum(waiting.pop(memory) for memory in list(waiting) if last_use[memory] == layer_id)
    return most


def _memory(param: nn.Parameter) -> int:
    """A number that identifies a parameter's memory. Each parameter on the meta device will get separate memory."""
    return id(param) if param.is_meta else param.untyped_storage().data_ptr()
