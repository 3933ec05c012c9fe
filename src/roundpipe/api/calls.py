"""Turns a user's arguments into a Call, and the results of its run into what the user gets.

Knows microbatches, bundles and runs; never devices, weights or plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from roundpipe.compiled import Compiling, Rehearsal
from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.context import LayerPhase
from roundpipe.devices import Event, wait_for_producers
from roundpipe.errors import UsageError
from roundpipe.microbatch import (
    Arriving,
    LossShares,
    MicrobatchInputs,
    check_merge_output,
    merge_outputs,
    pack_outputs,
    split_call,
)
from roundpipe.microbatch.specs import is_custom_function
from roundpipe.microbatch.split import CountedSplit
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.rng import Ambient
from roundpipe.runtime.run import Call, Costs, GradientParcel, LayerSettings, Parcel, Recall, Run, TaskSpan, Trace
from roundpipe.runtime.transfer import Bundle, check_movable
from roundpipe.split.transformers import caches_in
from roundpipe.stats import CallFigures
from roundpipe.store import LayerStore
from roundpipe.timeline import Span, Timeline

# Seed of every trial. Drawing a seed from the user's generator would change the user's sequence of random numbers.
_TRIAL_SEED = 0
_LOSS_KINDS = {False: "a tensor", True: "a sequence"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A user call after its inputs are split and its losses weighed, before it is planned.

    loss_fn: None in a call of forward().
    wants_outputs: False if the user gets the loss alone.
    first_microbatch: the number of the first microbatch in the whole batch, of which other machines run other parts.
    compiling: what of the layers runs compiled; None: nothing.
    """

    batches: MicrobatchInputs
    config: ResolvedRunConfig
    seed: int
    loss_fn: Callable[[Any, Any], Any] | None
    wants_outputs: bool
    first_microbatch: int = 0
    compiling: Compiling | None = None

    def of_trial(self, microbatch: int) -> Request:
        """The request of a trial: one microbatch alone, without outputs."""
        return dataclasses.replace(self, batches=self.batches.alone(microbatch), wants_outputs=False, seed=_TRIAL_SEED)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run before a call that returns nothing and changes no state of the model.

    It measures the activations of one microbatch of the call, or compiles the layers for it in a rehearsal.
    """

    microbatch: int
    tasks: tuple[StageTask, ...]
    costs: Costs
    phase: LayerPhase = LayerPhase.FORWARD
    rehearsal: Rehearsal | None = None

    def call(self, store: LayerStore, request: Request) -> Call:
        """The Call of this trial of a user's call."""
        request = request.of_trial(self.microbatch)
        inputs = CallInputs(request.batches)
        return new_call(store, request, inputs, self.tasks, self.costs, phase=self.phase, trial=self)


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """Checks a user's arguments and splits them into microbatches.

    additions: further keyword arguments that every microbatch gets as they are.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    config: ResolvedRunConfig
    additions: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def split(self) -> MicrobatchInputs:
        """The microbatches of the call. Runs the user's split functions, if there are any."""
        config = self.config
        if config.merge_output is not None and not isinstance(config.merge_output, bool):
            check_merge_output(config.merge_output)  # checked early: merging happens after the whole run
        # Values that a user's function splits may contain anything; the function's results are checked later.
        split_by_us = [] if callable(config.split_input) else [self.args, self.kwargs]
        split_by_us += [] if callable(config.split_label) else [self.label]
        for leaf in tree_leaves(split_by_us):
            if isinstance(leaf, torch.Tensor):
                check_movable(leaf)
        if config.requires_grad and (self.kwargs.get("use_cache") is True or caches_in(self.args, self.kwargs)):
            raise UsageError(
                "use_cache=True and past_key_values are for generating, under torch.no_grad(); leave them out in "
                "training. Adapters that train a cache, such as prefix tuning, are not supported."
            )
        batches = self._split_into(config.num_microbatch, self.label, config.split_label)
        if len(batches) > 1 and any(map(caches_in, batches.args, batches.kwargs)):
            raise UsageError(
                f"the {len(batches)} microbatches of this call would write to one cache (past_key_values); pass "
                "use_cache=False, or num_microbatch=1 in the run config."
            )
        return batches

    def split_into(self, num_microbatch: int) -> MicrobatchInputs | None:
        """The inputs in another number of microbatches, without labels; None if a function of the user splits them."""
        spec = self.config.split_input
        is_ours = spec is None or isinstance(spec, CountedSplit) or not is_custom_function(spec)
        return self._split_into(num_microbatch, None, None) if is_ours else None

    def _split_into(self, num_microbatch: int, label: Any, split_label: Any) -> MicrobatchInputs:
        return split_call(
            self.args,
            self.kwargs,
            label,
            num_microbatch=num_microbatch,
            split_input=self.config.split_input,
            split_label=split_label,
        ).with_kwargs(self.additions)


class CallInputs:
    """The inputs of a call, one bundle per microbatch.

    requiring_grad: the input tensors through which gradients flow on into the user's autograd graph.
    parcels: the inputs for the first task, detached from this graph.
    """

    def __init__(self, batches: MicrobatchInputs) -> None:
        self._bundles: list[Bundle] = []
        self.parcels: list[Parcel] = []
        for args, kwargs in zip(batches.args, batches.kwargs, strict=True):
            value, events = unwrapped((tuple(args), dict(kwargs)))
            bundle = Bundle.pack(value)
            self._bundles.append(bundle)
            self.parcels.append(Parcel(bundle.detached(), bundle.requires_grad, events))
        self.requiring_grad = [tensor for each in self._bundles for tensor in each.tensors if tensor.requires_grad]

    def select_gradients(self, parcels: Sequence[GradientParcel]) -> list[torch.Tensor | None]:
        """Gradients in the order of `requiring_grad`, each on the device of its input."""
        selected: list[torch.Tensor | None] = []
        for bundle, parcel in zip(self._bundles, parcels, strict=True):
            for event in parcel.events:
                event.wait()
            for tensor, gradient in zip(bundle.tensors, parcel.gradients, strict=True):
                if tensor.requires_grad:
                    selected.append(None if gradient is None else gradient.to(tensor.device))
        return selected

    def backward(self, parcels: Sequence[GradientParcel]) -> None:
        """Continue the backward pass from the inputs into the user's graph."""
        pairs = zip(self.requiring_grad, self.select_gradients(parcels), strict=True)
        known = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if known:
            torch.autograd.backward([tensor for tensor, _ in known], [gradient for _, gradient in known])


def new_call(
    store: LayerStore,
    request: Request,
    inputs: CallInputs,
    tasks: tuple[StageTask, ...],
    costs: Costs,
    *,
    schedule: Sequence[StageTask] = (),
    phase: LayerPhase = LayerPhase.FORWARD,
    trial: Trial | None = None,
) -> Call:
    """A complete Call. `schedule`: all tasks of the user's call; its backward tasks decide which inputs are saved.

    trial: what the run tries, if it is not the run of the user's call.
    """
    loss_fn, parcels, rows = request.loss_fn, inputs.parcels, request.batches.rows
    token_ids = [kwargs.get("input_ids") for kwargs in request.batches.kwargs]
    numbers = [ids.numel() for ids in token_ids if isinstance(ids, torch.Tensor)]
    signature: Hashable = None  # set for training calls only, which Recovery.is_proven compares
    if loss_fn is not None and trial is None:
        shapes = tuple(tuple((t.shape, t.dtype) for t in parcel.bundle.tensors) for parcel in parcels)
        signature = (tasks, costs.overlap, request.config.recompute_grain, shapes)
    return Call(
        tasks=tasks,
        recall=_new_recall(store, request, schedule),
        costs=costs,
        inputs=parcels,
        forward_phase=phase,
        labels=() if loss_fn is None else _label_bundles(request.batches),
        loss_fn=loss_fn,
        wants_outputs=request.wants_outputs,
        signature=signature,
        is_probe=trial is not None,
        rehearsal=None if trial is None else trial.rehearsal,
        num_rows=None if rows is None else sum(rows),
        num_tokens=sum(numbers) if len(numbers) == len(token_ids) else None,
    )


def _new_recall(store: LayerStore, request: Request, schedule: Sequence[StageTask]) -> Recall:
    """The Recall of a new call, with the present settings and buffers of the layers."""
    config, layers = request.config, store.layers
    recomputed = [task.layers for task in schedule if task.kind is TaskKind.BACKWARD]
    # A backward task recomputes its stage from the stage's input, or each layer from the layer's input.
    by_layer = config.recompute_grain is RecomputeGrain.LAYER
    return Recall(
        seed=request.seed,
        first_microbatch=request.first_microbatch,
        ambient=Ambient.capture(),
        preserve_rng_state=config.preserve_rng_state,
        grain=config.recompute_grain,
        # These are copies: later changes by the user or by another call must not affect this call's backward pass.
        settings=[LayerSettings.of(layer) for layer in layers],
        frozen_buffers={layer.layer_id: [b.frozen() for b in layer.buffers] for layer in layers if layer.buffers},
        save_points=frozenset(i for stage in recomputed for i in (stage if by_layer else stage[:1])),
        # Without `merged`, which refers to the inputs: the autograd graph of the outputs keeps this object.
        loss_shares=dataclasses.replace(request.batches.shares, merged=None),
        compiling=request.compiling,
    )


def _label_bundles(batches: MicrobatchInputs) -> list[Bundle]:
    """The labels of all microbatches as bundles. Waits until their tensors are filled."""
    bundles = [Bundle.pack(unwrapped(label, wait=True)[0]) for label in batches.labels]
    tensors = [tensor for bundle in bundles for tensor in bundle.tensors]
    for tensor in tensors:
        if tensor.requires_grad:
            raise UsageError(
                f"a label tensor of shape {tuple(tensor.shape)} requires grad; gradients flow to inputs only: "
                "detach() it, or pass it as an input of the model."
            )
    wait_for_producers(tensors)
    return bundles


def unwrapped(value: Any, *, wait: bool = False) -> tuple[Any, tuple[Event, ...]]:
    """The value without the `Arriving` wrappers of packed data, and the events after which its tensors are filled.

    wait: wait for the events instead of returning them.
    """
    leaves, spec = tree_flatten(value)
    arriving = [leaf for leaf in leaves if isinstance(leaf, Arriving)]
    if not arriving:
        return value, ()
    bare = tree_unflatten([leaf.value if isinstance(leaf, Arriving) else leaf for leaf in leaves], spec)
    events: list[Any] = [leaf.event for leaf in arriving if leaf.event is not None]
    if not wait:
        return bare, tuple(events)
    for event in events:
        event.wait()
    return bare, ()


# Turning the results of a run into what the user gets.


def summed_losses(run: Run) -> torch.Tensor | list[torch.Tensor]:
    """The sum of the microbatches' losses, in their order, on the CPU; a list if loss_fn returns a sequence.

    A single sum is also noted in the run's trace.
    """
    totals: list[torch.Tensor] = []
    is_sequence = run.losses[0][0]
    for microbatch in range(run.num_microbatch):
        also_sequence, values = run.losses[microbatch]
        if also_sequence is not is_sequence:
            kinds = [_LOSS_KINDS[kind] for kind in (also_sequence, is_sequence)]
            raise UsageError(
                f"loss_fn returned {kinds[0]} for microbatch {microbatch} but {kinds[1]} before; it must return the "
                "same for each."
            )
        values.event.wait()
        losses = [loss for loss in values.tensors if loss is not None]
        if totals and len(totals) != len(losses):
            raise UsageError(
                f"loss_fn returned {len(losses)} losses for microbatch {microbatch} but {len(totals)} before; it must "
                "return the same number for each."
            )
        # In the order of the microbatches: a floating-point sum depends on its order.
        totals = [total + loss for total, loss in zip(totals, losses, strict=True)] if totals else losses
    if is_sequence:
        return totals
    run.trace.loss = totals[0].item()
    return totals[0]


def merged(outputs: Sequence[Parcel], config: ResolvedRunConfig, shares: LossShares) -> Any:
    """The outputs of all microbatches, merged; with merge_output=False as packed data, without waiting for them."""
    values = [_on_output_device(parcel, config) for parcel in outputs]
    if config.merge_output is False:
        return pack_outputs(values, [parcel.events[0] for parcel in outputs])  # an output has exactly one event
    for parcel in outputs:
        for event in parcel.events:
            event.wait()
    return merge_outputs(values, config.merge_output, shares)


def _on_output_device(parcel: Parcel, config: ResolvedRunConfig) -> Any:
    """The output of one microbatch on the output device. If that is the CPU, its tensors may not be filled yet."""
    if config.output_device.type == "cpu":
        return parcel.bundle.unpack()
    for event in parcel.events:
        event.wait()
    return parcel.bundle.map(lambda tensor: tensor.to(config.output_device)).unpack()


def timeline_of(run: Run) -> Timeline:
    """The times of all tasks of a run, as the devices measured them. Waits until the run has finished."""
    run.wait_until_finished()
    return _timeline(run.trace.spans)


def _timeline(task_spans: Sequence[TaskSpan]) -> Timeline:
    spans = [Span(s.device, s.label, s.microbatch, s.start.seconds(), s.end.seconds()) for s in task_spans]
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))


def figures_of(trace: Trace) -> CallFigures:
    """The figures of a finished run: reads its times and adds up its bytes."""
    return CallFigures(
        generation=trace.generation,
        is_call=trace.is_call,
        started_s=trace.started_s,
        timeline=_timeline(trace.spans),
        rows=trace.num_rows,
        tokens=trace.num_tokens,
        loss=trace.loss,
        weights_up_bytes=sum(trace.upload_bytes),
        weights_kept_bytes=sum(trace.kept_bytes),
        activations_up_bytes=sum(traffic.activations_up for traffic in trace.traffic),
        activations_down_bytes=sum(traffic.activations_down for traffic in trace.traffic),
        gradients_down_bytes=sum(traffic.gradients_down for traffic in trace.traffic),
    )
