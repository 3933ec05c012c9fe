"""Calibration: makes a split plan by running the model on a small batch and testing what its code depends on.

Works on copies of the module tree that share the model's weights and hooks. The model itself does not change, except
that the model's library may install hooks in its first forward pass.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.module_copy import copy_tree
from roundpipe.split.dependence import Dependence
from roundpipe.split.determinism import WithoutDropout, fresh_generators, own_generators, refusing, state_of_generators
from roundpipe.split.discovery import Discovery, discover, record_events
from roundpipe.split.kernels import needs_gpu
from roundpipe.split.layers import element_tree
from roundpipe.split.observe import Recording
from roundpipe.split.plan import SplitPlan
from roundpipe.split.stubs import Ghosts, StubTree, refuse_offloading
from roundpipe.split.transformers import adopt_capturing_hooks, copied_cache, is_cache
from roundpipe.split.values import equal, is_plain, leaves_of, map_leaves

# Accepted relative difference between two runs of the same computation: kernels may sum in another order.
_CLOSE = 1e-4


class ChangesItself(ModelSplitError):
    """The model's forward replaced some modules but kept the parameters. The model can be split after it ran once."""


def calibrate(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_grad: bool, in_one: bool = False
) -> SplitPlan:
    """Return the split plan for calls of this form; raises ModelSplitError with the reason if there is none.

    in_one: use the modules that call the elements of repeated lists as blocks, instead of the elements themselves.
    """
    _refuse_random_depth(model)
    for module in model.modules():
        refuse_offloading(module)
    with (
        torch.random.fork_rng(devices=()),  # entered first, because own_generators draws from torch's generator
        own_generators(),
        WithoutDropout(),
        torch.set_grad_enabled(with_grad),
    ):
        return _Calibration(model, args, kwargs, in_one).plan()


class _Calibration:
    """One calibration of a model on one set of inputs."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_one: bool) -> None:
        self._model, self._args, self._kwargs, self._in_one = model, args, kwargs, in_one
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._ghosts = Ghosts(model)

    def plan(self) -> SplitPlan:
        seed = torch.get_rng_state()
        copy = PrivateCopy(self._model)
        # Outside of `refusing`, so that the user gets exceptions of the model's own code unchanged.
        outputs = self._first_run(copy)
        with refusing("finding out how it can be split"):
            return self._plan_of(copy.root, outputs, seed)

    def _plan_of(self, copy: nn.Module, outputs: Any, seed: torch.Tensor) -> SplitPlan:
        # The second run finds the blocks and taps.
        torch.set_rng_state(seed)
        args, kwargs = self._inputs()
        events, _ = record_events(copy, lambda: copy(*args, **kwargs))
        found = discover(copy, events, in_one=self._in_one)
        # The third run, on a stub tree, records all values. It uses the seed of the first run, so that the outputs of
        # both runs can be compared.
        tree = self._tree(copy, found)
        modules = {path: copy.get_submodule(path) for path in {*found.calls, *(tap.path for tap in found.taps)}}
        recording = Recording(frozenset(found.calls), modules)
        torch.set_rng_state(seed)
        args, kwargs = self._inputs()
        drawn = fresh_generators()
        recorded = recording.run(tree, args, kwargs)
        draws_globally = state_of_generators() != drawn
        _check_calls(found, recording)
        _check_outputs(outputs, recorded, draws_globally)
        plan = SplitPlan(
            calls=found.calls,
            taps=found.taps,
            outlines=tuple(c.outline for c in recording.calls),
            points=(0, len(found.calls)),
            reads={},
            needs={},
            copying=frozenset(),
            reasons={},
        )
        dependence = Dependence(tree, recording, plan, recorded, *self._inputs())
        self._find_points(dependence)
        self._find_reads(dependence, recording)
        self._find_needs(dependence, found)
        has_caches = any(is_cache(leaf) for call in recording.calls for leaf in call.arguments)
        return dataclasses.replace(
            dependence.plan, head=recording.head(), draws_globally=draws_globally, has_caches=has_caches
        )

    def _first_run(self, copy: PrivateCopy) -> Any:
        """Run the model's copy once and return its outputs. Raises ModelSplitError if the forward replaces modules."""
        before, params_before = list(copy.root.modules()), dict(copy.root.named_parameters())
        args, kwargs = self._inputs()
        outputs = copy.run(args, kwargs)
        if [id(module) for module in copy.root.modules()] != [id(module) for module in before]:
            params = dict(copy.root.named_parameters())
            if params.keys() != params_before.keys() or any(params[name] is not params_before[name] for name in params):
                raise ModelSplitError("its forward exchanges its own modules and their parameters")
            raise ChangesItself("its forward exchanges its own modules for inputs like these")
        return outputs

    def _find_points(self, dependence: Dependence) -> None:
        """Find the points: the segments whose code depends on outputs of blocks, and the first and last segment."""
        points, reasons = [0], {}
        while (unknown := dependence.first_unknown(points[-1])) is not None:
            points.append(unknown[0])
            reasons[unknown[0]] = unknown[1]
        points.append(dependence.plan.num_calls)
        dependence.plan = dataclasses.replace(dependence.plan, points=tuple(points), reasons=reasons)

    def _find_reads(self, dependence: Dependence, recording: Recording) -> None:
        """Find the tensors that each point reads. Adds points for segments whose tap outputs are read later."""
        # Repeat until no point is added, because a new point also reads tensors. Go from the last point to the first,
        # because the results of a point include the tap outputs that later points read.
        while True:
            dependence.plan = dataclasses.replace(dependence.plan, reads={}, copying=frozenset())
            for point in reversed(dependence.plan.points[1:]):
                read = dependence.reads_of(point)
                plan = dependence.plan
                dependence.plan = dataclasses.replace(plan, reads={**plan.reads, point: read})
            # The output of a tap that is read later must be computed from real values, so its segment must be a point.
            points = dependence.plan.points
            taps = {key[1] for read in dependence.plan.reads.values() for key in read if key[0] == "tap"}
            extra = {recording.taps[t].segment for t in taps} - set(points)
            if not extra:
                break
            dependence.plan = dataclasses.replace(
                dependence.plan,
                points=tuple(sorted({*points, *extra})),
                reasons={
                    **dependence.plan.reasons,
                    **dict.fromkeys(extra, "a later point reads the output of a module that it calls"),
                },
            )

        for point in dependence.plan.points:
            dependence.note_late_changes(point)

    def _find_needs(self, dependence: Dependence, found: Discovery) -> None:
        """Find the parameters that each point needs; tests that a replay with only these gives the same results."""
        forced = PrivateCopy(self._model, forced=True).root
        names = {id(param): name for name, param in forced.named_parameters()}
        forced_tree = self._tree(forced, found)
        by_path = dict(self._model.named_modules())
        plan = dependence.plan
        needs: dict[int, frozenset[str]] = {}
        for point in plan.points:
            # A point needs the parameters that its code uses directly and the parameters of its taps.
            own = {names[i] for i in dependence.parameters_reached(point, forced_tree) if i in names}
            for path in plan.taps_of(point):
                own |= {self._names[id(param)] for param in by_path[path].parameters()}
            needs[point] = frozenset(own)
            if not dependence.agrees_on(point, self._element_tree(plan, point, own)):
                # The code reads a parameter without autograd (detach, no_grad): give the point all parameters outside
                # of blocks and taps.
                needs[point] |= self._outside(plan)
                if not dependence.agrees_on(point, self._element_tree(plan, point, needs[point])):
                    raise ModelSplitError(f"the code of segment {point} uses weights in a way that cannot be traced")
        dependence.plan = dataclasses.replace(plan, needs=needs)

    def _outside(self, plan: SplitPlan) -> frozenset[str]:
        """Return the names of the parameters that are outside of blocks and taps."""
        inside = {
            id(param)
            for path, module in self._model.named_modules()
            if path in plan.stub_paths
            for param in module.parameters()
        }
        return frozenset(name for name, param in self._model.named_parameters() if id(param) not in inside)

    def _element_tree(self, plan: SplitPlan, point: int, needs: Any) -> nn.Module:
        """Return the root of the stub tree that a glue layer would use to replay `point`."""
        tree = element_tree(PrivateCopy(self._model).root, plan, point, needs, self._ghosts)
        tree.fill_in(torch.device("cpu"))
        return tree.root

    def _tree(self, copy: nn.Module, found: Discovery) -> nn.Module:
        """Return a stub tree that includes all modules and parameters."""
        stubs = frozenset([*found.calls, *(tap.path for tap in found.taps)])
        everything = {id(param) for param in copy.parameters()}
        return StubTree(copy, stubs, lambda module: True, everything, self._ghosts).root

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the inputs, because the model may write into them."""
        return fresh((self._args, self._kwargs))  # type: ignore[no-any-return]


def fresh(inputs: Any) -> Any:
    """Return copies of a call's inputs in host memory, because a model may write into tensors and fill caches."""
    return map_leaves(_fresh_leaf, inputs)


def _fresh_leaf(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copied_cache(leaf)


class PrivateCopy:
    """A copy of a model's module tree for runs on the host.

    Parameters are new objects that share the weights' memory, so gradients stay in the copy. They do not share version
    counters: a forward that wraps its parameters for a moment (torch.nn.utils.parametrize) counts that as a write.
    Buffers are copied, because a forward may write to them. Hooks that a forward registers stay in the copy.
    """

    def __init__(self, model: nn.Module, *, forced: bool = False) -> None:
        """Copy the tree. forced: every floating-point parameter of the copy requires grad."""

        def alias(param: nn.Parameter) -> nn.Parameter:
            wants_grad = param.requires_grad or (forced and param.is_floating_point())
            return nn.Parameter(param.data, requires_grad=wants_grad)

        self.root, self._pairs = copy_tree(model, parameter=alias, buffer=torch.Tensor.clone, own_hooks=True)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's forward returns for these arguments. Raises NeedsGpu for kernels of GPUs."""
        try:
            return self.root(*args, **kwargs)
        except Exception as error:
            of_kernel = needs_gpu(error, self.root)
            if of_kernel is None:
                raise
            raise of_kernel from error
        finally:
            adopt_capturing_hooks(self._pairs)


def _refuse_random_depth(model: nn.Module) -> None:
    """Raise ModelSplitError if the model skips layers at random, because a plan has a fixed sequence of calls."""
    for path, module in model.named_modules():
        rate = getattr(module, "layerdrop", None)
        if model.training and isinstance(rate, float) and rate > 0:
            raise ModelSplitError(f"{path or 'the model'} drops layers at random (layerdrop={rate}); set it to 0")


def let_change_itself(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model, not a copy, once on the host: its forward replaces its modules, as the user's call would do."""
    with torch.random.fork_rng(devices=()), own_generators(), torch.no_grad():
        args, kwargs = fresh((args, kwargs))
        model(*args, **kwargs)


def runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run a copy of the model once, without dropout. Returns True; the exceptions are the model's."""
    with torch.random.fork_rng(devices=()), own_generators(), WithoutDropout():
        args, kwargs = fresh((args, kwargs))
        PrivateCopy(model).run(args, kwargs)
    return True


def _check_calls(found: Discovery, recording: Recording) -> None:
    """Raise ModelSplitError if the recorded calls differ from those in `found`, or have unsupported arguments."""
    if [call.path for call in recording.calls] != list(found.calls) or [
        (tap.path, tap.segment) for tap in recording.taps
    ] != [(tap.path, tap.segment) for tap in found.taps]:
        raise ModelSplitError(
            "its forward calls modules that are not in its module tree, or in another order when it runs again"
        )
    for call in recording.calls:
        for leaf in call.arguments:
            if not _can_be_passed(leaf):
                raise ModelSplitError(
                    f"{call.path} receives a {type(leaf).__name__} object; only tensors, numbers, strings, modules, "
                    "functions, enums, configs and caches, and nests of them, can travel between layers"
                )


def _check_outputs(outputs: Any, recorded: Any, draws_globally: bool) -> None:
    """Raise ModelSplitError if the `recorded` outputs differ from the `outputs` of the first run."""
    expected, got = leaves_of(outputs), leaves_of(recorded)
    if len(expected) == len(got) and all(map(_close, expected, got)):
        return
    # Both runs had the same torch seed, but different states of Python's and numpy's generators. This explains the
    # difference if the model draws from these generators.
    if draws_globally:
        raise ModelSplitError(
            "it gives other results when it runs again: it draws random numbers from Python's or numpy's generators, "
            "for example to augment its inputs; turn that off"
        )
    raise ModelSplitError("its blocks give other results when they run separately: they share state")


def _can_be_passed(leaf: Any) -> bool:
    """Whether a leaf may be an argument of a block: all tensors inside the leaf can be found and moved to devices."""
    if isinstance(leaf, torch.Tensor | nn.Module | enum.Enum | types.FunctionType):
        return True
    return is_plain(leaf) or is_cache(leaf) or type(leaf).__name__.endswith("Config")


def _close(left: Any, right: Any) -> bool:
    """Whether two leaves are equal. Floating-point tensors may differ by rounding."""
    if equal(left, right):
        return True
    if not isinstance(left, torch.Tensor) or left.shape != right.shape or not left.is_floating_point():
        return False
    left, right = left.detach().double(), right.detach().double()
    return bool((left - right).abs().max() <= _CLOSE * left.abs().max())
