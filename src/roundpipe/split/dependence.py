"""What the code between blocks depends on: found by following values through it, and by running it on changed ones.

Part of calibration. Two tests are always made together, because each is blind where the other sees: values that stay
the same may still depend (a projector initialised with zeros, a choice between few), and code that leaves torch cannot
be followed.

Questions about autograd graphs, answered by walking them: nothing is differentiated and no memory is taken.

Follows labels from tensors to everything that is computed from them: what depends on what, whatever the values.

Used by calibration. Watches every operation, so integers, choices and results that happen to be zero are followed,
too, and sees where code looks at values itself: a number taken out of a tensor can steer anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import ModelSplitError
from roundpipe.split.determinism import drops, succeeds
from roundpipe.split.observe import Recording
from roundpipe.split.plan import Ledger, SplitPlan, State
from roundpipe.split.replay import Replay
from roundpipe.split.values import Held, Key, Outline, equal, leaves_of, structure_of, tensors_of


def leaves_reached(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the leaf tensors that gradients of any of `outputs` would flow to."""
    reached = {id(tensor) for tensor in outputs if tensor.requires_grad and tensor.grad_fn is None}
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return reached


Labels = frozenset[Key]
_NONE: Labels = frozenset()
# They hand memory to Python that is then read unseen.
_READERS = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))
_READING_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class Taint:
    """`drawing` names what random numbers depend on: called for each draw."""

    def __init__(self, on_read: Callable[[Labels], None], drawing: Callable[[], Labels] = lambda: _NONE) -> None:
        self._on_read, self._drawing = on_read, drawing
        self._labels: dict[int, Labels] = {}  # by storage: views of one memory depend on each other
        self._alive: list[torch.Tensor] = []  # so that addresses of storages stay unique

    def mark(self, tensor: torch.Tensor, labels: Labels) -> None:
        if labels:
            self._labels[_storage(tensor)] = self.labels_of(tensor) | labels
            self._alive.append(tensor.detach())

    def labels_of(self, value: Any) -> Labels:
        """Of all tensors in a value."""
        return _NONE.union(*(self._labels.get(_storage(tensor), _NONE) for tensor in tensors_of(value)))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self._read(args)
        value = func(*args, **kwargs)
        # Dropout draws nothing in calibration, but will.
        return self._marked(value, self._drawing()) if drops(func, args, kwargs) else value

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = _NONE if _looks_at_shapes_only(func) else self.labels_of((args, kwargs))
        if not _READING_TAGS.isdisjoint(func.tags):
            self._read(_choosing(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            labels |= self._drawing()
        value = self._marked(func(*args, **kwargs), labels)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._marked(given, labels)
        return value

    def _marked(self, value: Any, labels: Labels) -> Any:
        for tensor in tensors_of(value):
            self.mark(tensor, labels)
        return value

    def _read(self, value: Any) -> None:
        labels = self.labels_of(value)
        if labels:
            self._on_read(labels)


class _Functions(TorchFunctionMode):
    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._taint.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._taint.operation(func, args, kwargs or {})


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _looks_at_shapes_only(func: Any) -> bool:
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _choosing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments whose values decide the shape of a result, or become a number."""
    match func._schema.name:
        case "aten::index":  # integers choose what, masks also how many
            return [index for index in tensors_of(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        case "aten::masked_select":
            return args[1:]
    return args, kwargs


Poison = Callable[[torch.Tensor], torch.Tensor]
# A choice between few, by a sign say, may come out the same for one set of other values: several are tried.
POISONS: tuple[Poison, ...] = (lambda noise: noise, lambda noise: 3 * noise.abs(), lambda noise: -3 * noise.abs())


class _PoisonedReplay(Replay):
    """Goes on with random numbers for what blocks would return, and follows what is made of them."""

    def __init__(self, *args: Any, poison: Poison) -> None:
        super().__init__(*args)
        self._copies = True  # what it makes is compared later, when its code may have changed it
        self._poison = poison
        self.first_read: int | None = None  # the call before which its code looks at values
        self._taint = Taint(self._note_read)

    def run(self, tree: nn.Module) -> Any:
        with self._taint.following():
            return super().run(tree)

    def make_marker(self, outline: Outline) -> torch.Tensor:
        marker = torch.zeros(outline.shape, dtype=outline.dtype)
        if outline.dtype.is_floating_point:
            marker = self._poison(torch.randn(outline.shape)).to(outline.dtype)
        self._taint.mark(marker, frozenset([("guessed",)]))
        return marker

    def guesses(self, tensor: torch.Tensor) -> bool:
        return bool(self._taint.labels_of(tensor))

    def _note_read(self, labels: Labels) -> None:
        if self.first_read is None:
            self.first_read = self.num_calls


class Dependence:
    """One model, one recorded run. `plan` has calls, taps and outlines; points and reads are being found."""

    def __init__(
        self, tree: nn.Module, recording: Recording, plan: SplitPlan, outputs: Any, args: Any, kwargs: Any
    ) -> None:
        self.plan = plan
        self._tree, self._truth, self._outputs = tree, recording, outputs
        self._inputs, self._ledger = Ledger.begin(plan, None, args, kwargs)
        self._ledger = dataclasses.replace(
            self._ledger,
            outputs={k: (call.outline.value, call.outline.captured) for k, call in enumerate(recording.calls)},
            taps={t: tap.outline for t, tap in enumerate(recording.taps)},
        )

    # Which calls' arguments are known before the blocks before them have run.

    def first_unknown(self, point: int) -> tuple[int, str] | None:
        """The first call after `point` that needs a point of its own, and why; None if there is none."""
        found = [self._first_unknown(point, poison) for poison in POISONS]
        return min((each for each in found if each is not None), default=None)

    def _first_unknown(self, point: int, poison: Poison) -> tuple[int, str] | None:
        end = self.plan.num_calls
        ledger = self._planned(points=(point, end))
        replay = _PoisonedReplay(ledger, point, self._state_at(point), torch.device("cpu"), poison=poison)
        crash: Exception | None = None
        try:
            replay.run(self._tree)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            crash = error
        for k in range(point, end):
            reason = self._why_unknown(replay, point, k, crash)
            if reason is not None:
                if k == point:
                    raise ModelSplitError(
                        f"the code before call {k} ({self.plan.calls[k]}) cannot be run apart: {reason}"
                    )
                return k, reason
        return None

    def _why_unknown(self, replay: _PoisonedReplay, point: int, k: int, crash: Exception | None) -> str | None:
        call, record = self._truth.calls[k], replay.calls.get(k)
        if record is None:
            return f"it is not reached with other values in place of the outputs of earlier blocks: {crash!r}"
        if replay.first_read is not None and replay.first_read <= k:
            return "the code before it looks at values of earlier blocks"
        leaves = leaves_of(record.arguments)
        if structure_of(record.arguments) != call.argument_structure or len(leaves) != len(call.arguments):
            return "its arguments have another structure when earlier blocks return other values"
        for i, (leaf, value) in enumerate(zip(leaves, call.argument_values, strict=True)):
            if type(leaf) is Held and leaf.key in replay.made and replay.guesses(replay.made[leaf.key]):
                return f"argument {i} is computed from the output of an earlier block"
            reason = self._why_other(replay, point, k, i, leaf, value)
            if reason is not None:
                return f"argument {i} {reason}"
        return None

    def _why_other(self, replay: _PoisonedReplay, point: int, k: int, i: int, leaf: Any, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None if equal(leaf, value) else f"is {leaf!r:.60} and not {value!r:.60}"
        if type(leaf) is not Held:
            return "is no tensor any more"
        true_key = self._truth.key_of_argument(k, i)
        if true_key is not None and true_key[1] >= point:
            return None if leaf.key == true_key else f"is not the very output of call {true_key[1]}"
        if leaf.key[0] in ("out", "cap") and leaf.key[1] >= point:
            return "is taken from another place"
        found = replay.made.get(leaf.key)
        if found is None:
            found = self._state_at(point)[leaf.key]
        return None if equal(found, value) else "depends on the outputs of earlier blocks"

    # What the code of a point reads of what came before it.

    def reads_of(self, point: int) -> frozenset[Key]:
        """The earlier tensors that the results of `point` depend on. Notes if its code changes what it is given."""
        candidates = self._truth.candidates(point)
        found = self._followed(point, candidates)
        if found is None:
            self.plan = dataclasses.replace(self.plan, copying=self.plan.copying | {point})
            found = self._followed(point, candidates)
            if found is None:
                raise ModelSplitError(
                    f"the code of segment {point} changes tensors in place in a way that is not followed"
                )
        # Integers have no other values that code would bear, so only one of the two tests is made: they are read.
        read = found | {key for key, tensor in candidates.items() if not tensor.is_floating_point()}
        return frozenset(self._with_values_read(point, candidates, read))

    def _followed(self, point: int, candidates: State) -> set[Key] | None:
        """Keys whose values reach the results; None if the code changed what it was given."""
        given = {key: tensor.clone() for key, tensor in (candidates | self._inputs).items()}
        versions = {key: tensor._version for key, tensor in given.items()}
        read: set[Key] = set()
        replay = Replay(self._planned(), point, given, torch.device("cpu"))
        taint = Taint(read.update, lambda: frozenset([("drawn", replay.num_calls)]))
        for key in candidates:
            taint.mark(given[key], frozenset([key]))
        with taint.following():
            results = self._results(point, replay, given)
        if any(tensor._version != versions[key] for key, tensor in given.items()):
            return None
        self._require(self._agree(point, results), f"the code of segment {point} gives other values when it runs again")
        reached = taint.labels_of(list(results.values()))
        self._require(
            all(label[0] != "drawn" or label[1] >= point for label in reached),
            f"the code of segment {point} uses random numbers drawn in an earlier one, and would draw others",
        )
        return {label for label in reached | read if label[0] != "drawn"}

    def _with_values_read(self, point: int, candidates: State, read: set[Key]) -> set[Key]:
        """`read` and what else changes the results, though it could not be followed."""
        with torch.no_grad():
            if not self._agrees_without(point, candidates, read):
                for key in candidates.keys() - read:
                    if not self._agrees_without(point, candidates, candidates.keys() - {key}):
                        read = read | {key}
                self._require(
                    self._agrees_without(point, candidates, read),
                    f"what the code of segment {point} reads could not be found out",
                )
            only = {key: candidates[key].clone() for key in read}
            self._require(self._agrees_with(point, only), f"the code of segment {point} reads what seemed to be dead")
        return read

    def _agrees_without(self, point: int, candidates: State, keep: Any) -> bool:
        """Whether the results are the true ones whatever stands in place of tensors that are not to be kept."""
        return all(self._agrees_with(point, self._poisoned(candidates, keep, poison)) for poison in POISONS)

    @staticmethod
    def _poisoned(candidates: State, keep: Any, poison: Poison) -> State:
        return {
            key: poison(torch.randn(t.shape)).to(t.dtype) if key not in keep and t.is_floating_point() else t.clone()
            for key, t in candidates.items()
        }

    def _agrees_with(self, point: int, state: State) -> bool:
        def agrees() -> bool:
            given = {**state, **self._cloned_inputs()}
            replay = Replay(self._planned(), point, given, torch.device("cpu"))
            return self._agree(point, self._results(point, replay, given))

        return succeeds(f"the code of segment {point} bears other values", agrees, passing=(ModelSplitError,))

    def _results(self, point: int, replay: Replay, state: State) -> dict[Any, Any]:
        """What a replay of `point` hands on: arguments of its calls and tap outputs, or the model's outputs."""
        returned = replay.run(self._tree)
        if point == self.plan.num_calls:
            return dict(enumerate(leaves_of(returned)))
        results: dict[Any, Any] = {}
        for k in range(point, self.plan.end_of(point)):
            for i, leaf in enumerate(leaves_of(replay.calls[k].arguments)):
                if type(leaf) is Held:
                    found = replay.made.get(leaf.key, state.get(leaf.key))
                    if found is not None:
                        results[k, i] = found
        return results | {key: tensor for key, tensor in replay.made.items() if key[0] == "tap"}

    def _agree(self, point: int, results: dict[Any, Any]) -> bool:
        expected = self._expected(point)
        return all(key in results and equal(value, results[key]) for key, value in expected.items())

    def _expected(self, point: int) -> dict[Any, Any]:
        if point == self.plan.num_calls:
            return dict(enumerate(leaves_of(self._outputs)))
        expected: dict[Any, Any] = {}
        for k in range(point, self.plan.end_of(point)):
            for i, value in enumerate(self._truth.calls[k].argument_values):
                key = self._truth.key_of_argument(k, i)
                is_new_output = key is not None and key[1] >= point
                if isinstance(value, torch.Tensor) and not is_new_output:
                    expected[k, i] = value
        for read in self.plan.reads.values():
            for key in read:
                if key[0] == "tap" and self._truth.taps[key[1]].segment == point:
                    expected[key] = self._truth.taps[key[1]].output_values[key[2]]
        return expected

    def note_late_changes(self, point: int) -> None:
        """Let a point whose code changes in place what it has handed on, hand on copies."""
        replay = Replay(self._planned(), point, self._state_at(point), torch.device("cpu"))
        with torch.no_grad():
            replay.run(self._tree)
        if replay.changed_what_it_made():
            self.plan = dataclasses.replace(self.plan, copying=self.plan.copying | {point})

    # Which parameters a point must have.

    def parameters_reached(self, point: int, tree: nn.Module) -> set[int]:
        """Ids of the parameters of `tree`, all of which require grad, that gradients of the results would flow to."""
        with torch.enable_grad():
            replay = Replay(self._planned(), point, self._state_at(point), torch.device("cpu"))
            returned = replay.run(tree)
        results = tensors_of(returned) if point == self.plan.num_calls else list(replay.made.values())
        return leaves_reached(results)

    def agrees_on(self, point: int, tree: nn.Module) -> bool:
        """Whether a replay over `tree`, from nothing but what the point reads, gives the true results."""
        state = {key: t for key, t in self._truth.candidates(point).items() if key in self.plan.reads.get(point, ())}
        before, self._tree = self._tree, tree
        try:
            with torch.no_grad():
                return self._agrees_with(point, state)
        finally:
            self._tree = before

    # Inside.

    def _planned(self, points: tuple[int, ...] | None = None) -> Ledger:
        plan = self.plan if points is None else dataclasses.replace(self.plan, points=points)
        return dataclasses.replace(self._ledger, plan=plan)

    def _cloned_inputs(self) -> State:
        return {key: tensor.clone() for key, tensor in self._inputs.items()}

    def _state_at(self, point: int) -> State:
        return {**self._truth.candidates(point), **self._cloned_inputs()}

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ModelSplitError(otherwise)
