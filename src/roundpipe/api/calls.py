"""A call's values on their way in and out: microbatches to parcels, results to what the user gets.

Used by api.engine. Knows microbatches and runs, never devices or weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.devices import Event, wait_for_producers
from roundpipe.errors import ModelChangedError, UsageError
from roundpipe.microbatch import (
    Arriving,
    LossShares,
    MicrobatchInputs,
    check_merge_output,
    check_split_input,
    check_split_label,
    merge_outputs,
    pack_outputs,
    split_call,
)
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.replica import LayerSettings
from roundpipe.runtime.rng import Ambient
from roundpipe.runtime.run import GradientParcel, Parcel, Recall, Run
from roundpipe.runtime.transfer import check_movable
from roundpipe.runtime.values import Bundle
from roundpipe.store import LayerStore, OptimizerCopy, ParameterRecord
from roundpipe.timeline import Span, Timeline

_LOSS_KINDS = {False: "a tensor", True: "a sequence"}


def split_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], label: Any, config: ResolvedRunConfig
) -> MicrobatchInputs:
    check_split_input(config.split_input)
    check_split_label(config.split_label)
    check_merge_output(config.merge_output)
    by_us = [] if callable(config.split_input) else [args, kwargs]
    by_us += [] if callable(config.split_label) else [label]
    for leaf in tree_leaves(by_us):
        if isinstance(leaf, torch.Tensor):
            check_movable(leaf)
    return split_call(
        args,
        kwargs,
        label,
        num_microbatch=config.num_microbatch,
        split_input=config.split_input,
        split_label=config.split_label,
    )


class CallInputs:
    """The inputs of all microbatches, as bundles; tensors that require grad keep their place in the user's graph."""

    def __init__(self, batches: MicrobatchInputs) -> None:
        self._labels = batches.labels
        self._bundles: list[Bundle] = []
        self._events: list[tuple[Event, ...]] = []
        for args, kwargs in zip(batches.args, batches.kwargs, strict=True):
            value, events = _unwrapped((tuple(args), dict(kwargs)))
            self._bundles.append(Bundle.pack(value))
            self._events.append(events)

    @property
    def any_requires_grad(self) -> bool:
        return any(any(bundle.requires_grad) for bundle in self._bundles)

    def shapes(self) -> Hashable:
        """Of all tensors, labels not included."""
        return tuple(tuple((t.shape, t.dtype) for t in bundle.tensors) for bundle in self._bundles)

    def parcels(self) -> list[Parcel]:
        wait_for_producers([tensor for bundle in self._bundles for tensor in bundle.tensors])
        return [
            Parcel(bundle.detached(), bundle.requires_grad, events)
            for bundle, events in zip(self._bundles, self._events, strict=True)
        ]

    def label_bundles(self) -> list[Bundle]:
        bundles = [Bundle.pack(_unwrapped(label, wait=True)[0]) for label in self._labels]
        for bundle in bundles:
            for tensor in bundle.tensors:
                if tensor.requires_grad:
                    raise UsageError(
                        f"a label tensor of shape {tuple(tensor.shape)} requires grad; gradients flow to inputs only: "
                        "detach() it, or pass it as an input of the model."
                    )
        wait_for_producers([tensor for bundle in bundles for tensor in bundle.tensors])
        return bundles

    def requiring_grad(self) -> list[torch.Tensor]:
        return [tensor for bundle in self._bundles for tensor in bundle.tensors if tensor.requires_grad]

    def select_gradients(self, parcels: Sequence[GradientParcel]) -> list[torch.Tensor | None]:
        """Gradients in the order of `requiring_grad`, each on its input's device."""
        selected: list[torch.Tensor | None] = []
        for bundle, parcel in zip(self._bundles, parcels, strict=True):
            for event in parcel.events:
                event.wait()
            for tensor, gradient in zip(bundle.tensors, parcel.gradients, strict=True):
                if tensor.requires_grad:
                    selected.append(None if gradient is None else gradient.to(tensor.device))
        return selected

    def backward(self, parcels: Sequence[GradientParcel]) -> None:
        """Let the inputs' gradients flow on into the user's graph."""
        pairs = zip(self.requiring_grad(), self.select_gradients(parcels), strict=True)
        known = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if known:
            torch.autograd.backward([tensor for tensor, _ in known], [gradient for _, gradient in known])


def new_recall(
    store: LayerStore, tasks: Sequence[StageTask], config: ResolvedRunConfig, seed: int, shares: LossShares
) -> Recall:
    """What a call fixes when it begins, for whatever comes after its forward."""
    recomputed = [task.layers for task in tasks if task.kind is TaskKind.BACKWARD]
    by_layer = config.recompute_grain is RecomputeGrain.LAYER
    layers = store.layers
    return Recall(
        seed=seed,
        ambient=Ambient.capture(),
        preserve_rng_state=config.preserve_rng_state,
        grain=config.recompute_grain,
        settings=[LayerSettings.of(layer) for layer in layers],
        frozen_buffers={layer.layer_id: [b.frozen() for b in layer.buffers] for layer in layers if layer.buffers},
        save_points=frozenset(i for stage in recomputed for i in (stage if by_layer else stage[:1])),
        loss_shares=shares,
    )


def summed_losses(run: Run) -> torch.Tensor | list[torch.Tensor]:
    """The losses of all microbatches added up in their order, on the CPU."""
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
        totals = [total + loss for total, loss in zip(totals, losses, strict=True)] if totals else losses
    return totals if is_sequence else totals[0]


def merged(outputs: Sequence[Parcel], config: ResolvedRunConfig, shares: LossShares) -> Any:
    """The outputs as the user asked for them: put together, or packed by microbatch without waiting."""
    values = [_moved(parcel, config) for parcel in outputs]
    if config.merge_output is False:
        return pack_outputs(values, [parcel.events[0] for parcel in outputs])
    for parcel in outputs:
        for event in parcel.events:
            event.wait()
    return merge_outputs(values, config.merge_output, shares)


def _moved(parcel: Parcel, config: ResolvedRunConfig) -> Any:
    if config.output_device.type == "cpu":
        return parcel.bundle.unpack()
    for event in parcel.events:
        event.wait()
    return parcel.bundle.map(lambda tensor: tensor.to(config.output_device)).unpack()


def _unwrapped(value: Any, *, wait: bool = False) -> tuple[Any, tuple[Event, ...]]:
    """The value without the wrappers of packed data, and the events after which its tensors are filled."""
    events: list[Any] = []

    def unwrap(leaf: Any) -> Any:
        if not isinstance(leaf, Arriving):
            return leaf
        if leaf.event is not None:
            events.append(leaf.event)
        return leaf.value

    bare = tree_map(unwrap, value, is_leaf=lambda node: isinstance(node, Arriving))
    if wait:
        for event in events:
            event.wait()
        events = []
    return bare, tuple(events)


def require_grad_mode(config: ResolvedRunConfig) -> None:
    if not config.requires_grad:
        raise UsageError(
            "forward_backward() needs gradients, but they are off (torch.no_grad() or requires_grad=False); "
            "call forward() for inference."
        )


def owned_records(
    named: Sequence[tuple[str, nn.Parameter]], stores: Sequence[LayerStore], model_name: str
) -> dict[int, tuple[LayerStore, ParameterRecord]]:
    """Where each parameter lives, by id."""
    owned = {id(record.param): (store, record) for store in stores for record in store.parameters}
    for name, param in named:
        if id(param) not in owned:
            raise ModelChangedError(
                f"{model_name}: parameter {name!r} was added after wrapping; close() the model, then wrap it again."
            )
    return owned


def one_by_one(named: Sequence[tuple[str, OptimizerCopy]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Each copy may give its memory back before the next one is looked at, as when all are saved."""
    for name, copy in named:
        yield name, copy
        copy.rest_between_steps()


def timeline_of(run: Run) -> Timeline:
    """What ran when, as the devices measured it."""
    run.wait_until_finished()
    spans = [Span(s.device, s.label, s.microbatch, s.start.seconds(), s.end.seconds()) for s in run.spans]
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))
