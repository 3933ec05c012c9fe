"""Everything behind one wrapped model: its store, its share of the pool, its optimizer thread, its calls.

Owned by api.model.RoundPipe, and outlives it only until its finalizer has closed it. Methods are the verbs of the
public API; each enters `call_lock` and begins with `_begin_call`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.api.calls import (
    CallInputs,
    merged,
    new_recall,
    one_by_one,
    owned_records,
    require_grad_mode,
    split_inputs,
    summed_losses,
    timeline_of,
)
from roundpipe.api.failures import restoring_grad_mode
from roundpipe.api.loss_weights import OwnLoss, weighed
from roundpipe.api.member import Member
from roundpipe.api.planner import CallKind, Scheduler
from roundpipe.api.split_model import SplitModel
from roundpipe.config import ResolvedRunConfig
from roundpipe.context import LayerPhase, announce_step, current_iteration
from roundpipe.devices import HostPinner
from roundpipe.errors import StaleGraphError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.monitor import shielded
from roundpipe.plan import ModelProfile, RunType, StageTask, TaskKind
from roundpipe.runtime.autograd import attach
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.rng import draw_call_seed
from roundpipe.runtime.run import GradientParcel, Recall, Run
from roundpipe.split.replay import CallOrderChanged
from roundpipe.store import LayerStore, PinMode
from roundpipe.timeline import Timeline

logger = logging.getLogger("roundpipe")
_PROBE_SEED = 0  # what it draws is not looked at, and the user's generator must not notice


class ModelEngine(Member):
    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Mapping[int, str],
        *,
        name: str,
        pool: DevicePool,
        optim_dtype: torch.dtype | None,
        pin_mode: PinMode,
        pinner: HostPinner,
    ) -> None:
        self.num_devices = pool.num_devices
        store = LayerStore(
            layers, names, optim_dtype=optim_dtype, pin_mode=pin_mode, pinner=pinner, monitor=pool.monitor
        )
        super().__init__(name, store, pool)
        self.split_model: SplitModel | None = None  # what is split into the layers, if anything is
        self.own_loss: OwnLoss | None = None  # of a model of transformers

    # The calls.

    @restoring_grad_mode
    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: ResolvedRunConfig,
        additions: Mapping[str, Any] = {},
    ) -> Any:
        """`additions`: keyword arguments for every microbatch, whatever the inputs are cut into."""
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost)
            without_label = dataclasses.replace(config, split_label=None)
            batches = self._lock.run_user_code(lambda: split_inputs(args, kwargs, None, without_label))
            batches = self._weighed(batches.with_kwargs(additions), config, None)
            if config.requires_grad:
                self._check_training()
            self._admit(batches, config.requires_grad)
            carry_out = self._forward_with_grad if config.requires_grad else self._infer
            seed = draw_call_seed()
            return self._until_it_fits(
                lambda: carry_out(batches, config, seed), batches, with_grad=config.requires_grad, may_repeat=True
            )

    @restoring_grad_mode
    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: ResolvedRunConfig,
        additions: Mapping[str, Any] = {},
    ) -> Any:
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost)
            require_grad_mode(config)
            batches = self._lock.run_user_code(lambda: split_inputs(args, kwargs, label, config))
            batches = self._weighed(batches.with_kwargs(additions), config, loss_fn)
            self._check_training()
            self._admit(batches, True)
            seed = draw_call_seed()
            self.store.masters.training_begins()
            return self._until_it_fits(
                lambda: self._train(batches, loss_fn, return_outputs, config, seed),
                batches,
                with_grad=True,
                may_repeat=not self._has_gradients(),  # a failed call drops them
            )

    @restoring_grad_mode
    def step(self, step_fn: Callable[[], object], is_async: bool) -> None:
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost, *self._members)
            for member in self._members:
                member.store.gradients.conceal()
                member._steps_are_exact = not is_async
            announce_step(self.stepper.iteration)
            # An asynchronous step has the next iteration's time: it need not begin before its gradients are whole.
            may_overlap = not is_async and self._recovery.all_are_proven()
            job = self.stepper.issue(step_fn, is_async, may_overlap)
            try:
                if is_async:
                    return
                try:
                    self.stepper.wait_for(job)
                except BaseException:
                    self.stepper.forsake(job)
                    raise
                job.raise_error()
                self.raise_failures("the step was not carried out")
            finally:
                self.end_host_graphs()

    @restoring_grad_mode
    def synchronize(self) -> None:
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost, *self._members)
            self.show_newest()
            self.end_host_graphs()

    @restoring_grad_mode
    def wait_for_visible_weights(self) -> None:
        """Until the weights in host memory are of one version: the one calls read now."""
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost, *self._members)
            self._wait_for_visible_weights()

    @restoring_grad_mode
    def host_forward(self, forward: Callable[[], Any]) -> Any:
        """Run a forward on the host that calls other members and reads this engine's parameters where they lie.

        Gradients that autograd has put on the latter stay with it until a step takes them, so that they are summed in
        its order.
        """
        with self.call_lock() as is_outermost:
            self._surface_failures(is_outermost)
            self._plain_loop.leave()
            self.store.check_unchanged()
            self._follow_writes()
            self._wait_for_visible_weights()
            if torch.is_grad_enabled():
                self._check_training()
            return self._recovery.undoing_buffers(
                [member.store for member in self._members], lambda: self._lock.run_user_code(forward)
            )

    @restoring_grad_mode
    def zero_grad(self) -> None:
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost, *self._members)
            for member in self._members:
                member.store.wait_until_landed(self.stepper.generation)
            self.raise_failures("gradients were dropped")
            self.stepper.wait_until_idle()  # a step that runs has gradients in hand
            self._recovery.drop_gradients(self.stepper.generation)
            for member in self._members:
                for copy in member.store.masters.existing():
                    copy.drop_gradient()

    def show_gradients_without_copies(self) -> None:
        """Fill `.grad` of the parameters where no optimizer copies exist: code that clips gradients looks there."""
        is_busy = self.is_closed or self.is_entered() or current_iteration() is not None
        if is_busy or any(member.store.masters.exist for member in self._members):
            return
        if self._has_gradients():
            with self.call_lock() as is_outermost:
                self._begin_call(is_outermost, *self._members)
                for member in self._members:
                    member.store.wait_until_landed(self.stepper.generation)
                    member.store.gradients.expose()

    @restoring_grad_mode
    def named_masters(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's copies of those parameters that require grad, made where they do not exist yet."""
        self._refuse_inherited()
        owned = owned_records(named, [member.store for member in self._members], self.name)
        wanted = [(name, *owned[id(param)]) for name, param in named if param.requires_grad]
        if any(record.master is None for _, _, record in wanted) and not self.stepper.is_current_thread():
            with self.call_lock() as is_outermost:
                self._begin_call(is_outermost, *self._members)
                self._check_training()
                for _, store, record in wanted:
                    store.masters.of(record)
        return one_by_one([(name, store.masters.of(record)) for name, store, record in wanted])

    def planning_profile(self) -> ModelProfile:
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost)
            return self._scheduler.profile()

    def timeline(self) -> Timeline:
        """What ran when in the most recent call, as the devices measured it."""
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost)
            run = self._last_run
            if run is None:
                return Timeline(())
            return timeline_of(run)

    # Parts of a call.

    def _weighed(
        self, batches: MicrobatchInputs, config: ResolvedRunConfig, loss_fn: Callable[[Any, Any], Any] | None
    ) -> MicrobatchInputs:
        """The microbatches and how much the loss of each counts."""
        return weighed(batches, config, self.own_loss, loss_fn, self._come_to_rest)

    def _admit(self, batches: MicrobatchInputs, with_grad: bool) -> None:
        """Let a model that is split into layers know what call is coming, so that it has a plan for it."""
        if self.split_model is None:
            return
        with torch.set_grad_enabled(with_grad):
            unknown = self.split_model.unknown_calls(batches)
            if unknown:
                self._come_to_rest()  # its modules run on the host now, on weights nobody may be writing
                try:
                    has_changed = self.split_model.learn(unknown)
                except BaseException:  # some of them may have been learned
                    self._rearrange(self.split_model.layers)
                    raise
                if has_changed:
                    self._rearrange(self.split_model.layers)

    def _rearrange(self, layers: Sequence[nn.Module]) -> None:
        def rearrange() -> None:
            self.store.rearrange(layers, visible=self.stepper.visible_version, newest=self.stepper.steps_issued)
            self._scheduler = Scheduler(self.store, self._pool, self.name)
            self._last_run = None

        shielded(rearrange)

    def _until_it_fits(
        self, carry_out: Callable[[], Any], batches: MicrobatchInputs, *, with_grad: bool, may_repeat: bool
    ) -> Any:
        """Planned smaller each time it runs out of device memory, and split by more than its form where that misled.

        Where it may not be repeated, that is for the next time.
        """
        while True:
            try:
                return carry_out()
            except CallOrderChanged as error:
                with torch.set_grad_enabled(with_grad):
                    has_other_plan = self.split_model is not None and self.split_model.distrust(batches)
                if not has_other_plan or not may_repeat:
                    raise error.__cause__ or error from None  # the failure may well be the model's own
                logger.info("%s: this call is split in a way of its own: %s", self.name, error)
                self._admit(batches, with_grad)
            except torch.OutOfMemoryError as error:
                if not (self._scheduler.plan_smaller() and may_repeat):
                    raise
                logger.warning("%s: trying again with a smaller plan: %s", self.name, str(error).split(". ")[0])

    def _train(
        self,
        batches: MicrobatchInputs,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: ResolvedRunConfig,
        seed: int,
    ) -> Any:
        kind = CallKind.of(RunType.FUSED, batches, config, self._steps_are_exact)
        tasks = self._schedule(kind, batches, config, loss_fn)
        recall = new_recall(self.store, tasks, config, seed, batches.shares)
        run = self._new_run(tasks, kind, recall, LayerPhase.FORWARD)
        run.loss_fn, run.wants_outputs = loss_fn, return_outputs
        inputs = CallInputs(batches)
        run.labels = inputs.label_bundles()
        run.signature = (tasks, run.tail, config.recompute_grain, inputs.shapes())

        def finish() -> Any:
            run.wait_for_losses()
            losses = summed_losses(run)
            parcels = run.take_outputs() if return_outputs else []
            self._recovery.commit_buffers(run)
            outputs = (
                self._lock.run_user_code(lambda: merged(parcels, config, batches.shares)) if return_outputs else None
            )
            if inputs.any_requires_grad or (self._scheduler.memory_is_limited and not self._recovery.is_proven(run)):
                run.wait_until_finished()  # the first of its kind may run out of memory, and is then repeated
                run.check()
            if inputs.any_requires_grad:
                gradients = [run.input_gradients[j] for j in range(run.num_microbatch)]
                self._lock.run_user_code(lambda: inputs.backward(gradients))
            return (losses, outputs) if return_outputs else losses

        return self._carry_out(run, inputs, finish)

    def _has_gradients(self) -> bool:
        """Whether anything was gathered since the last step, or is on its way."""
        pending = self._recovery.is_gathering(self.stepper.generation)
        return pending or any(member.store.gradients.has_any() for member in self._members)

    def _probe(
        self,
        kind: CallKind,
        batches: MicrobatchInputs,
        config: ResolvedRunConfig,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        """Run the first microbatch forward, one layer at a time, to see what activations take; nothing of it stays."""
        self._recovery.wait_for_runs()  # one of them may have measured just what the plan needs
        self._learn()
        if not self._scheduler.is_blind(kind):
            return
        tasks = self._scheduler.probe_tasks(with_loss=loss_fn is not None)
        recall = new_recall(self.store, (), config, _PROBE_SEED, batches.shares)
        run = self._new_run(tasks, kind, recall, LayerPhase.FORWARD, is_probe=True)
        inputs = CallInputs(batches.first())
        run.loss_fn, run.wants_outputs, run.labels = loss_fn, False, inputs.label_bundles()

        def finish() -> None:
            run.wait_until_finished()
            run.check()

        self._carry_out(run, inputs, finish)
        self._last_run = None
        self._learn()

    def _infer(self, batches: MicrobatchInputs, config: ResolvedRunConfig, seed: int) -> Any:
        kind = CallKind.of(RunType.INFER, batches, config)
        recall = new_recall(self.store, (), config, seed, batches.shares)
        run = self._new_run(self._schedule(kind, batches, config), kind, recall, LayerPhase.INFERENCE)

        def finish() -> Any:
            outputs = run.take_outputs()
            self._recovery.commit_buffers(run)
            return self._lock.run_user_code(lambda: merged(outputs, config, batches.shares))

        return self._carry_out(run, CallInputs(batches), finish)

    def _forward_with_grad(self, batches: MicrobatchInputs, config: ResolvedRunConfig, seed: int) -> Any:
        kind = CallKind.of(RunType.TRAIN, batches, config)
        tasks = self._schedule(kind, batches, config)
        forward_tasks = tuple(task for task in tasks if task.kind is TaskKind.FORWARD)
        recall = new_recall(self.store, tasks, config, seed, batches.shares)
        run = self._new_run(forward_tasks, kind, recall, LayerPhase.FORWARD)
        inputs = CallInputs(batches)

        def finish() -> Any:
            outputs = run.take_outputs()
            self._recovery.commit_buffers(run)
            with_grad = [t for p in outputs for t, flag in zip(p.bundle.tensors, p.requires_grad, strict=True) if flag]
            # The node of the outputs keeps this alive. It must not reach the run: a run that fails keeps its exception,
            # whose frames keep the outputs, and no collector sees a cycle that goes through autograd's graph.
            backward = functools.partial(
                self._backward,
                kind,
                tasks[len(forward_tasks) :],
                recall,
                (run.version, self._num_writes),
                inputs,
                [p.requires_grad for p in outputs],
            )
            attached = iter(attach(with_grad, inputs.requiring_grad(), backward))
            for j, parcel in enumerate(outputs):
                pairs = zip(parcel.bundle.tensors, parcel.requires_grad, strict=True)
                outputs[j] = parcel.with_tensors([next(attached) if flag else tensor for tensor, flag in pairs])
            return self._lock.run_user_code(lambda: merged(outputs, config, batches.shares))

        return self._carry_out(run, inputs, finish)

    @restoring_grad_mode
    def _backward(
        self,
        kind: CallKind,
        tasks: Sequence[StageTask],
        recall: Recall,
        weights_read: tuple[int, int],
        inputs: CallInputs,
        output_flags: Sequence[tuple[bool, ...]],
        gradients: tuple[torch.Tensor | None, ...],
    ) -> list[torch.Tensor | None]:
        """Called by autograd with the gradients of all microbatches' outputs; returns those of the inputs."""
        with self.call_lock() as is_outermost:
            self._begin_call(is_outermost)
            if weights_read != (self.stepper.visible_version, self._num_writes):
                raise StaleGraphError(
                    f"{self.name}: the weights were updated between this forward (version {weights_read[0]}) and "
                    f"its backward (version {self.stepper.visible_version}); call backward() before step()."
                )
            run = self._new_run(tasks, kind, recall, LayerPhase.FORWARD)
            given = iter(gradients)
            parcels = [GradientParcel(tuple(next(given) if flag else None for flag in flags)) for flags in output_flags]

            def finish() -> list[torch.Tensor | None]:
                run.wait_until_finished()
                run.check()
                self.store.gradients.expose()  # as autograd fills `.grad`
                return inputs.select_gradients([run.input_gradients[j] for j in range(run.num_microbatch)])

            try:
                return self._carry_out(run, parcels, finish)
            except torch.OutOfMemoryError:
                self._scheduler.plan_smaller()
                raise

    def _schedule(
        self,
        kind: CallKind,
        batches: MicrobatchInputs,
        config: ResolvedRunConfig,
        loss_fn: Callable[[Any, Any], Any] | None = None,
    ) -> tuple[StageTask, ...]:
        return self._scheduler.schedule(kind, config, lambda: self._probe(kind, batches, config, loss_fn))

    def _new_run(
        self,
        tasks: Sequence[StageTask],
        kind: CallKind,
        recall: Recall,
        phase: LayerPhase,
        *,
        is_probe: bool = False,
    ) -> Run:
        run = Run(
            self.store,
            tasks,
            1 if is_probe else kind.num_microbatch,
            recall,
            forward_phase=phase,
            version=self.stepper.visible_version,
            generation=self.stepper.generation,
            iteration=self.stepper.iteration,
            on_failure=self._recovery.run_failed,
            is_probe=is_probe,
        )
        self._scheduler.prepare(run, kind)
        return run
