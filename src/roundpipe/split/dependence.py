"""Finds what the model's code between blocks depends on. Part of calibration.

Two tests are combined, because each misses cases that the other finds:
- Tracing (`Taint`): labels are passed on from tensors to everything that is computed from them. It finds dependences
  that do not show in the values, such as a projector initialised with zeros. It misses code outside of torch.
- Poisoning: the code runs again with random numbers in place of tensors. If the results change, they depend on these
  tensors, whatever the code does. It misses dependences that happen not to change the results.
The parameters that the code uses are found by walking the autograd graph; no gradient is computed.
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
from roundpipe.split.determinism import OUT_OF_MEMORY, drops, succeeds
from roundpipe.split.observe import Recording
from roundpipe.split.plan import Ledger, SplitPlan, State
from roundpipe.split.replay import Replay
from roundpipe.split.values import Held, Key, Outline, equal, leaves_of, structure_of, tensors_of

Labels = frozenset[Key]
_NONE: Labels = frozenset()
# Functions that return the values of a tensor to code outside of torch, where values cannot be traced.
_READERS = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))
# Operations whose result is a Python number, or whose output shape depends on values.
_READING_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
Poison = Callable[[torch.Tensor], torch.Tensor]  # turns normal noise into the values that replace those of a tensor
# There are several poisons because code may branch on a value, for example on its sign. With a single poison the code
# could take the same branch as with the true values.
POISONS: tuple[Poison, ...] = (lambda noise: noise, lambda noise: 3 * noise.abs(), lambda noise: -3 * noise.abs())


class Dependence:
    """Tests what the code of one model depends on: replays its segments and compares the results with a recorded run.

    At the start `plan` has calls, taps and outlines. The caller adds points, reads and needs to it step by step.
    """

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

    # Points. A segment must be a point if the arguments of the call after it depend on the outputs of earlier blocks.

    def first_unknown(self, point: int) -> tuple[int, str] | None:
        """Return the first call after `point` whose segment must be a point, and the reason; None if there is none.

        Replays `point` with random numbers in place of the outputs of blocks. The arguments of a call are known without
        running these blocks if they are the same as in the recorded run.
        """
        found = [self._first_unknown(point, poison) for poison in POISONS]
        return min((each for each in found if each is not None), default=None)

    def _first_unknown(self, point: int, poison: Poison) -> tuple[int, str] | None:
        end = self.plan.num_calls
        # A plan without points between `point` and the epilogue, so that the replay does not stop before the epilogue.
        ledger = self._planned(points=(point, end))
        replay = _PoisonedReplay(ledger, point, self._state_at(point), torch.device("cpu"), poison=poison)
        crash: Exception | None = None
        try:
            replay.run(self._tree)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            crash = error
        for k in range(point, end):
            reason = self._why_unknown(replay, point, k, crash)
            if reason is not None:
                if k == point:
                    raise ModelSplitError(
                        f"the code before call {k} ({self.plan.calls[k]}) cannot run separately: {reason}"
                    )
                return k, reason
        return None

    def _why_unknown(self, replay: _PoisonedReplay, point: int, k: int, crash: Exception | None) -> str | None:
        """Return why this replay does not determine the arguments of call k; None if it does."""
        call, record = self._truth.calls[k], replay.calls.get(k)
        if record is None:
            return f"it is not reached when earlier blocks return other values: {crash!r}"
        if replay.first_read is not None and replay.first_read <= k:
            return "the code before it reads values that earlier blocks computed"
        leaves = leaves_of(record.arguments)
        if structure_of(record.arguments) != call.argument_structure or len(leaves) != len(call.arguments):
            return "its arguments have another structure when earlier blocks return other values"
        for i, (leaf, value) in enumerate(zip(leaves, call.argument_values, strict=True)):
            if type(leaf) is Held and leaf.key in replay.made and replay.guesses(replay.made[leaf.key]):
                return f"argument {i} is computed from the output of an earlier block"
            reason = self._why_different(replay, point, k, i, leaf, value)
            if reason is not None:
                return f"argument {i} {reason}"
        return None

    def _why_different(self, replay: _PoisonedReplay, point: int, k: int, i: int, leaf: Any, value: Any) -> str | None:
        """Return how argument i of call k, `leaf`, differs from the recorded `value`; None if it does not."""
        if not isinstance(value, torch.Tensor):
            return None if equal(leaf, value) else f"is {leaf!r:.60} instead of {value!r:.60}"
        if type(leaf) is not Held:
            return "is not a tensor when earlier blocks return other values"
        # An argument that is the output of a call from `point` on has no true value in a replay. Its key is compared
        # instead.
        true_key = self._truth.key_of_argument(k, i)
        if true_key is not None and true_key[1] >= point:
            return None if leaf.key == true_key else f"is not the output of call {true_key[1]}"
        if leaf.key[0] in ("out", "cap") and leaf.key[1] >= point:
            return "is the output of another block"
        found = replay.made.get(leaf.key)
        if found is None:
            found = self._state_at(point)[leaf.key]
        return None if equal(found, value) else "depends on the outputs of earlier blocks"

    # Reads: which earlier tensors the code of a point depends on.

    def reads_of(self, point: int) -> frozenset[Key]:
        """Return the keys of earlier tensors that the results of `point` depend on. Results: see `_results`.

        If the code changes a given tensor or a placeholder in place, `point` is added to `plan.copying`.
        """
        candidates = self._truth.candidates(point)
        found = self._traced(point, candidates)
        if found is None:
            self.plan = dataclasses.replace(self.plan, copying=self.plan.copying | {point})
            found = self._traced(point, candidates)
            if found is None:
                raise ModelSplitError(
                    f"the code of segment {point} changes tensors in place in a way that cannot be traced"
                )
        # Integer tensors cannot be tested by poisoning, because code that indexes with random integers fails. So all
        # integer tensors count as read.
        read = found | {key for key, tensor in candidates.items() if not tensor.is_floating_point()}
        return frozenset(self._with_values_read(point, candidates, read))

    def _traced(self, point: int, candidates: State) -> set[Key] | None:
        """Return the keys of the tensors that the results depend on, found by tracing a replay.

        Returns None if the code changed a given tensor in place, or failed without copies: torch refuses to write into
        placeholders, whose elements share their memory.
        """
        given = {key: tensor.clone() for key, tensor in (candidates | self._inputs).items()}
        versions = {key: tensor._version for key, tensor in given.items()}
        read: set[Key] = set()  # labels of the tensors whose values Python code reads
        replay = Replay(self._planned(), point, given, torch.device("cpu"))
        # The label of random numbers is ("drawn", number of the segment that draws them).
        taint = Taint(read.update, lambda: frozenset([("drawn", replay.num_calls)]))
        for key in candidates:
            taint.mark(given[key], frozenset([key]))
        try:
            with taint.following():
                results = self._results(point, replay, given)
        except (ModelSplitError, *OUT_OF_MEMORY):
            raise
        except Exception:
            if point in self.plan.copying:
                raise
            return None
        if any(tensor._version != versions[key] for key, tensor in given.items()):
            return None
        self._require(self._agree(point, results), f"the code of segment {point} gives other values when it runs again")
        reached = taint.labels_of(list(results.values()))
        # Each replay has its own random stream, so it cannot repeat the numbers that an earlier segment drew.
        self._require(
            all(label[0] != "drawn" or label[1] >= point for label in reached),
            f"the code of segment {point} uses random numbers drawn in an earlier one, and would draw others",
        )
        return {label for label in reached | read if label[0] != "drawn"}

    def _with_values_read(self, point: int, candidates: State, read: set[Key]) -> set[Key]:
        """Return `read`, which tracing found, and further keys whose tensors change the results when poisoned."""
        with torch.no_grad():
            if not self._agrees_without(point, candidates, read):
                for key in candidates.keys() - read:
                    if not self._agrees_without(point, candidates, candidates.keys() - {key}):
                        read = read | {key}
                self._require(
                    self._agrees_without(point, candidates, read),
                    f"it cannot be determined what the code of segment {point} reads",
                )
            # The last test: the replay gets only the tensors in `read`, and placeholders of NaN for all others.
            only = {key: candidates[key].clone() for key in read}
            self._require(
                self._agrees_with(point, only), f"the code of segment {point} reads tensors that seemed to be unused"
            )
        return read

    def _agrees_without(self, point: int, candidates: State, keep: Any) -> bool:
        """Whether the results equal the recorded ones although all float tensors not in `keep` have random values."""
        return all(self._agrees_with(point, self._poisoned(candidates, keep, poison)) for poison in POISONS)

    @staticmethod
    def _poisoned(candidates: State, keep: Any, poison: Poison) -> State:
        return {
            key: poison(torch.randn(t.shape)).to(t.dtype) if key not in keep and t.is_floating_point() else t.clone()
            for key, t in candidates.items()
        }

    def _agrees_with(self, point: int, state: State) -> bool:
        """Whether a replay of `point` on `state` gives the recorded results."""

        def agrees() -> bool:
            given = {**state, **self._cloned_inputs()}
            replay = Replay(self._planned(), point, given, torch.device("cpu"))
            return self._agree(point, self._results(point, replay, given))

        return succeeds(f"the code of segment {point} works with other values", agrees, passing=(ModelSplitError,))

    def _results(self, point: int, replay: Replay, state: State) -> dict[Any, Any]:
        """Run a replay and return its results.

        The results of the epilogue are the model's outputs. The results of any other point are the tensors among the
        arguments of its calls, and the outputs of its taps that later points read.
        """
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
        """Return the recorded results of `point`, by the same keys as `_results`."""
        if point == self.plan.num_calls:
            return dict(enumerate(leaves_of(self._outputs)))
        expected: dict[Any, Any] = {}
        for k in range(point, self.plan.end_of(point)):
            for i, value in enumerate(self._truth.calls[k].argument_values):
                key = self._truth.key_of_argument(k, i)
                # In a replay of `point`, outputs of calls from `point` on are markers without true values.
                is_new_output = key is not None and key[1] >= point
                if isinstance(value, torch.Tensor) and not is_new_output:
                    expected[k, i] = value
        for read in self.plan.reads.values():
            for key in read:
                if key[0] == "tap" and self._truth.taps[key[1]].segment == point:
                    expected[key] = self._truth.taps[key[1]].output_values[key[2]]
        return expected

    def note_late_changes(self, point: int) -> None:
        """Add `point` to `plan.copying` if its code changes a tensor in place after it was added to `Replay.made`.

        Or if the code writes into a placeholder, as in `_traced`.
        """
        replay = Replay(self._planned(), point, self._state_at(point), torch.device("cpu"))
        try:
            with torch.no_grad():
                replay.run(self._tree)
            has_changed = replay.changed_what_it_made()
        except (ModelSplitError, *OUT_OF_MEMORY):
            raise
        except Exception:
            if point in self.plan.copying:
                raise
            has_changed = True
        if has_changed:
            self.plan = dataclasses.replace(self.plan, copying=self.plan.copying | {point})

    # Needs: which parameters the code of a point uses.

    def parameters_reached(self, point: int, tree: nn.Module) -> set[int]:
        """Return the ids of the parameters of `tree` that the results of `point` depend on.

        Every parameter of `tree` must require grad.
        """
        with torch.enable_grad():
            replay = Replay(self._planned(), point, self._state_at(point), torch.device("cpu"))
            returned = replay.run(tree)
        results = tensors_of(returned) if point == self.plan.num_calls else list(replay.made.values())
        return _leaves_reached(results)

    def agrees_on(self, point: int, tree: nn.Module) -> bool:
        """Whether a replay on `tree`, given only the tensors that the point reads, gives the recorded results."""
        state = {key: t for key, t in self._truth.candidates(point).items() if key in self.plan.reads.get(point, ())}
        before, self._tree = self._tree, tree
        try:
            with torch.no_grad():
                return self._agrees_with(point, state)
        finally:
            self._tree = before

    def _planned(self, points: tuple[int, ...] | None = None) -> Ledger:
        """Return a ledger with the current `plan`. points: used in place of the plan's points, if given."""
        plan = self.plan if points is None else dataclasses.replace(self.plan, points=points)
        return dataclasses.replace(self._ledger, plan=plan)

    def _cloned_inputs(self) -> State:
        return {key: tensor.clone() for key, tensor in self._inputs.items()}

    def _state_at(self, point: int) -> State:
        """Return copies of all tensors that exist before `point` runs."""
        return {**self._truth.candidates(point), **self._cloned_inputs()}

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ModelSplitError(otherwise)


class _PoisonedReplay(Replay):
    """A replay whose markers contain random numbers. Traces which tensors are computed from markers."""

    def __init__(self, *args: Any, poison: Poison) -> None:
        super().__init__(*args)
        # Keep copies in `made`: they are compared after the run, and the code may have changed the tensors in place.
        self._copies = True
        self._poison = poison
        # The number of the segment in which Python code first reads a value that was computed from a marker.
        self.first_read: int | None = None
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
        """Whether a tensor was computed from a marker."""
        return bool(self._taint.labels_of(tensor))

    def _note_read(self, labels: Labels) -> None:
        # Python code can do anything with a value that it reads, so the arguments of all later calls are unknown.
        if self.first_read is None:
            self.first_read = self.num_calls


class Taint:
    """Passes labels on from tensors to all tensors computed from them, in every torch operation inside `following`.

    Tracing does not look at values. So it also traces integers, comparisons and results that happen to be zero.
    """

    def __init__(self, on_read: Callable[[Labels], None], drawing: Callable[[], Labels] = lambda: _NONE) -> None:
        """Create a trace without labels.

        on_read: called with the labels of a tensor when Python code reads its values. Everything that happens later may
            depend on these values.
        drawing: called at each draw of random numbers; returns the labels for the random numbers.
        """
        self._on_read, self._drawing = on_read, drawing
        self._labels: dict[int, Labels] = {}  # by storage, because views share memory and must share labels
        self._alive: list[torch.Tensor] = []  # references to labelled tensors, so that storage addresses are not reused

    def mark(self, tensor: torch.Tensor, labels: Labels) -> None:
        """Add labels to a tensor and all its views."""
        if labels:
            self._labels[_storage(tensor)] = self.labels_of(tensor) | labels
            self._alive.append(tensor.detach())

    def labels_of(self, value: Any) -> Labels:
        """Return the labels of all tensors in a value."""
        return _NONE.union(*(self._labels.get(_storage(tensor), _NONE) for tensor in tensors_of(value)))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Trace the operations of this thread."""
        with _Functions(self), _Operations(self):
            yield

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function. Reports values that Python code reads, and labels the results of dropout."""
        if getattr(func, "__name__", "") in _READERS:
            self._read(args)
        value = func(*args, **kwargs)
        # The results of dropout are labelled as random: they are random in training, although calibration turns dropout
        # off.
        return self._marked(value, self._drawing()) if drops(func, args, kwargs) else value

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an aten operation. Its results get the labels of all its arguments."""
        labels = _NONE if _looks_at_shapes_only(func) else self.labels_of((args, kwargs))
        if not _READING_TAGS.isdisjoint(func.tags):
            self._read(_choosing(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            labels |= self._drawing()
        value = self._marked(func(*args, **kwargs), labels)
        # Arguments that the operation writes to also get the labels.
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
    """Passes calls of torch functions to a Taint. This level shows dropout and conversions to Python values."""

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._taint.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Passes calls of aten operations to a Taint. Every computation with tensors consists of aten operations."""

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
    """Whether an operation (zeros_like, new_empty) uses the shape and dtype of its argument but no values."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _choosing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of an operation whose values determine the shape of its result or become a Python number."""
    match func._schema.name:
        case "aten::index":  # the result's shape depends on the values of masks, but not of integer indices
            return [index for index in tensors_of(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        case "aten::masked_select":
            return args[1:]
    return args, kwargs


def _leaves_reached(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the leaf tensors that get a gradient in a backward pass from `outputs`."""
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
