"""When layers are compiled: in rehearsals, before the first run whose inputs have new shapes.

[Note: rehearsals] A rehearsal is a run of one microbatch, one layer after the other. Each layer runs eagerly, then
compiled, both times forward and backward, and the results are compared: compilers have errors, and a layer whose code
computes other values or gradients runs eagerly. No stage waits for a compiler, and which code a layer runs depends on
the inputs that have come so far, never on which device was faster. torch.compile keeps state for the whole process
while it traces: a lock lets one thread compile at a time, and a thread that runs compiled code meanwhile waits where
torch would refuse it.

[Note: sizes after a resume] Sizes that came first are constants in the code, later ones are variable, and the two kinds
of code may round differently. So the order in which sizes came is saved with a checkpoint: a resumed run takes the same
code for the same inputs, whichever come first now. Sizes after the first four share one rehearsal, which provides
the code with variable sizes in a resumed run that begins with them.

[Note: masks] Models leave out a mask that hides nothing, so blocks may have a mask in one microbatch and none in
another of the same sizes. Microbatches whose masks differ in this way are rehearsed separately, and share the order of
sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from roundpipe.compiled.kinds import COMPILING, MOST_SHAPES, CompiledPart, Constants, add_seconds, compilations
from roundpipe.compiled.options import CompileOptions, PartsToCompile
from roundpipe.fingerprints import differing, fingerprint

logger = logging.getLogger("roundpipe")
T = TypeVar("T")
Sizes = tuple[tuple[int, ...], ...]
_BY_VALUE = (bool, str, type(None))  # arguments of these types are constants in compiled code
_OF_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64)
_MOST_REPEATS = 3  # runs of compiled code in a rehearsal that may compile further graphs
_MOST_SETTINGS = 16  # different flags and hooks for which a model is compiled


class Rehearsal(NamedTuple):
    """One microbatch to rehearse with. `order`: the place of its sizes among those of its class, 0 for the first."""

    microbatch: int
    order: int


class Compiling:
    """What is compiled in the calls of one model, and the inputs for which that was done."""

    def __init__(self, parts: PartsToCompile) -> None:
        self.parts = parts
        self.constants = Constants()
        self._order: dict[str, list[Sizes]] = {}  # by class of inputs: the sizes in the order in which they came
        self._settings: set[Hashable] = set()
        self._done: set[Hashable] = set()

    @classmethod
    def of(cls, options: CompileOptions | None, model: nn.Module) -> Compiling | None:
        """What is compiled in the user's model with the option `compile`; None if nothing is."""
        parts = PartsToCompile(options, model)
        return cls(parts) if parts else None

    def missing(self, settings: Hashable, purpose: str, microbatches: Sequence[Iterable[Any]]) -> Iterator[Rehearsal]:
        """The microbatches that are still to be rehearsed; each is, before the next one is asked for.

        settings: everything beside the inputs that changes compiled code. purpose: whether a backward follows.
        microbatches: the leaves of their inputs.
        """
        if settings not in self._settings:
            if len(self._settings) == _MOST_SETTINGS:
                logger.warning(
                    "compile: flags or hooks of the layers changed for the %dth time; calls with further ones run "
                    "eagerly. Register hooks once instead of before every call.",
                    _MOST_SETTINGS,
                )
            if len(self._settings) >= _MOST_SETTINGS:
                self._settings.add(None)  # the warning comes once
                return
            self._settings.add(settings)
        for number, leaves in enumerate(microbatches):
            class_, sizes, masks = _class_sizes_and_masks(purpose, leaves)
            order = self._order.setdefault(class_, [])
            if sizes not in order and len(order) < MOST_SHAPES:
                order.append(sizes)
            place = order.index(sizes) if sizes in order else MOST_SHAPES
            if (settings, class_, masks, place) not in self._done:
                yield Rehearsal(number, place)
                self._done.add((settings, class_, masks, place))

    def state(self) -> dict[str, list[Sizes]]:
        """What a checkpoint holds: see [Note: sizes after a resume]."""
        return {class_: list(order) for class_, order in self._order.items()}

    def take_over(self, state: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> None:
        """Continue with the sizes of a checkpoint."""
        self._order = {class_: [tuple(map(tuple, sizes)) for sizes in order] for class_, order in state.items()}
        self._done.clear()
        self.constants = Constants()


def _class_sizes_and_masks(purpose: str, leaves: Iterable[Any]) -> tuple[str, Sizes, tuple[str, ...]]:
    """The class of a microbatch, its sizes, and what its masks hide: see [Note: masks]."""
    class_, sizes, masks = [purpose], list[tuple[int, ...]](), list[str]()
    for leaf in leaves:
        value = getattr(leaf, "value", leaf)  # that of an `Arriving`
        if value is leaf and isinstance(value, torch.Tensor):
            masks.append(_hides(value))
        if isinstance(value, torch.Tensor):
            class_.append(f"{value.dtype}[{value.dim()}]{' grad' if value.requires_grad else ''}")
            sizes.append(tuple(value.shape))
        else:
            class_.append(repr(value) if isinstance(value, _BY_VALUE) else type(value).__name__)
    return ", ".join(class_), tuple(sizes), tuple(masks)


def _hides(tensor: torch.Tensor) -> str:
    """Whether a tensor that may be a mask has zeros, ones or both; "" for others, and where reading it would wait."""
    is_dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.dtype not in _OF_MASKS or tensor.dim() < 2 or not tensor.numel():
        return ""
    least, most = (int(each) for each in tensor.aminmax())
    return f"{least}{most}" if least >= 0 and most <= 1 else ""


class _Result:
    """Fingerprints of the outputs and gradients of a layer."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._found = {name: fingerprint(tensor).cpu() for name, tensor in tensors.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def require_equal(self, compiled: _Result) -> None:
        """Raise CompiledOtherwise if compiled code has computed other values than `self`, but for rounding."""
        name = differing(self._found, compiled._found, self._dtypes)
        if name is not None:
            raise CompiledOtherwise(f"compiled code computes {name} otherwise")


class CompiledOtherwise(Exception):
    """Compiled code does not compute what the layer computes."""


class CompiledAnew(Exception):
    """A layer needs other code for each call."""


def _repeat_until_nothing_is_compiled(forward: Callable[[], object]) -> None:
    """Run compiled code again, so that steps compile nothing: a layer may set attributes in its first call."""
    for _ in range(_MOST_REPEATS):
        before = compilations().graphs
        forward()
        if compilations().graphs == before:
            return
    raise CompiledAnew(
        "each call would be compiled anew, because it changes Python values that it depends on, such as a counter or a "
        "list to which a hook appends"
    )


def rehearsed(
    parts: Sequence[CompiledPart],
    order: int,
    forward: Callable[[], T],
    backward: Callable[[T], Mapping[str, torch.Tensor]],
) -> T:
    """Compile the parts of a layer, and return what its `forward` returns then; see [Note: rehearsals].

    order: see `Rehearsal`. backward: runs the layer backward, and returns its outputs and gradients by name.
    """
    with COMPILING:
        for part in parts:
            part.seen = []
        try:
            result = forward()
            seen = [(part, part.kind, form) for part in parts for form in part.seen or () if part.kind is not None]
        finally:
            for part in parts:
                part.seen = None
        expected = _Result(backward(result)) if any(kind.reason is None for _, kind, _ in seen) else None
        while expected is not None:
            for part, kind, form in seen:
                kind.admit(form, order, part.constants)
            if all(kind.reason is not None for _, kind, _ in seen):
                return result
            before, began_s = compilations().graphs, time.perf_counter()
            try:
                compiled = forward()
                found = _Result(backward(compiled))
                if all(kind.options.draws_as_eager for _, kind, _ in seen):
                    expected.require_equal(found)
                if compilations().graphs > before:
                    _repeat_until_nothing_is_compiled(forward)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, because the layer has just run with the same inputs
                for _, kind, _ in seen:
                    kind.give_up(error)
                continue
            if compilations().graphs > before:
                names, seconds = (
                    ", ".join(dict.fromkeys(kind.name for _, kind, _ in seen)),
                    time.perf_counter() - began_s,
                )
                add_seconds(seconds)
                logger.info("compiled %s in %.1f s", names, seconds)
            return compiled
        return result
