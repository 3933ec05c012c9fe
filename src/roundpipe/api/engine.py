"""Carries out the calls of one wrapped model: splits inputs, plans, runs, and returns results.

Owns the model's store, its planner and its share of the device pool. Models that are stepped together share a Group,
which owns their call lock, steps and failures. Knows neither the wrapper that the user holds nor how a layer runs on a
device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe.api.calls import CallInputs, InputSplit, Request, Trial, merged, new_call, summed_losses, timeline_of
from roundpipe.api.failures import restoring_grad_mode
from roundpipe.api.group import Group, Scope, api_call
from roundpipe.api.loss_trials import OwnLoss
from roundpipe.api.loss_weights import ModelLosses, WholeBatch, losses_of_all_machines
from roundpipe.api.plain_loop import PlainLoop
from roundpipe.api.planner import CallKind, Planner
from roundpipe.api.split_model import PreparedCall, SplitModel, UnsplitModel
from roundpipe.compiled import Compiling
from roundpipe.config import ResolvedRunConfig
from roundpipe.context import LayerPhase, announce_step, current_iteration
from roundpipe.devices import HostPinner, wait_for_producers
from roundpipe.distributed.machines import Machines
from roundpipe.errors import ModelChangedError, StaleGraphError, UsageError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.monitor import Latch, shielded
from roundpipe.plan import ModelProfile, RunType, StageTask, TaskKind
from roundpipe.runtime.autograd import attach
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import Call, GradientParcel, Parcel, Recall, Residence, Run, RunCancelled
from roundpipe.split.caches import CacheContents
from roundpipe.split.replay import CallOrderChanged
from roundpipe.split.transformers import caches_in
from roundpipe.stats import StepStats
from roundpipe.store import LayerRecord, LayerStore, PinMode
from roundpipe.store.update import StepMode
from roundpipe.store.weights import one_by_one
from roundpipe.timeline import Timeline

logger = logging.getLogger("roundpipe")
_MOST_TRACES = 32  # finished runs that may wait for stats(), which reads their times
_LossFn = Callable[[Any, Any], Any]
_T = TypeVar("_T")


class ModelEngine:
    """Carries out the calls of one wrapped model. Its public methods are the calls of the API."""

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
        split_model: SplitModel | None = None,
        own_loss: OwnLoss | None = None,
        unsplit_model: UnsplitModel | None = None,
        process_group: Any = None,
        staleness: int = 1,
        master_bits: int = 32,
        compiling: Compiling | None = None,
    ) -> None:
        """split_model: the model that `layers` were split from, if there is one.
        own_loss: the loss that the model computes itself, if it computes one.
        unsplit_model: prepares the calls of a module that runs as one layer.
        process_group, staleness, master_bits: as for RoundPipe.
        compiling: what of the layers runs compiled; None: nothing.
        """
        self.name, self.compiling = name, compiling
        self.specs, self.num_devices = pool.specs, pool.num_devices
        self.split_model, self._unsplit_model = split_model, unsplit_model
        self.losses = ModelLosses(name, own_loss or OwnLoss(nn.ModuleList(layers), layers))
        machines = Machines.of(process_group, name, pool.monitor)
        self.store = LayerStore(
            layers,
            names,
            optim_dtype=optim_dtype,
            pin_mode=pin_mode,
            pinner=pinner,
            monitor=pool.monitor,
            share=None if machines is None else machines.share,
            staleness=staleness,
            master_bits=master_bits,
        )
        self.store.devices = pool.devices_while_open()
        self.group = Group(name, self, PlainLoop, machines, staleness)
        self.is_unreachable, self.num_writes, self.is_joined = False, 0, False  # joined: in another model's group
        self.num_hooks_outside: int | None = None  # hooks on this part before the call of the model around it
        self._pool, self._planner = pool, Planner(self.store, pool, name)
        self._last_run: Run | None = None  # the most recent run, whose times timeline() returns

    # Calls for training and inference.

    @api_call(Scope.MODEL, everywhere=True)
    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: ResolvedRunConfig) -> Any:
        """Run the model on a batch; with grad, the outputs can be backpropagated."""
        config = dataclasses.replace(config, split_label=None)
        request = self._request(args, kwargs, None, config)
        carry_out = self._forward_with_grad if config.requires_grad else self._infer
        outputs = self._until_it_fits(carry_out, request, may_repeat=True)
        return losses_of_all_machines(self.group.machines, None, outputs, request)[1]

    @api_call(Scope.MODEL, everywhere=True)
    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any,
        loss_fn: _LossFn,
        return_outputs: bool,
        config: ResolvedRunConfig,
    ) -> Any:
        """Run forward, loss and backward of a batch; return the loss, or (loss, outputs) if `return_outputs`."""
        if not config.requires_grad:
            raise UsageError(
                "forward_backward() needs gradients, but they are off (torch.no_grad() or requires_grad=False); "
                "call forward() for inference."
            )
        request = self._request(args, kwargs, label, config, loss_fn, return_outputs)
        # A failed call drops all gradients gathered since the last step, so it can be repeated only if it is the first.
        result = self._until_it_fits(self._train, request, may_repeat=not self.group.recovery.has_gradients())
        losses, outputs = result if return_outputs else (result, None)
        losses, outputs = losses_of_all_machines(self.group.machines, losses, outputs, request, self._last_run)
        return (losses, outputs) if return_outputs else losses

    @api_call(Scope.GROUP, everywhere=True)
    def step(self, step_fn: Callable[[], object], is_async: bool, staleness: int | None = None) -> Latch:
        """Pass `step_fn` to the optimizer thread, and wait until it has run if the mode of the step is EXACT.

        staleness: of this step; None for that of the model. Returns the latch that the end of the step sets.
        """
        group, stepper = self.group, self.group.stepper
        mode = group.mode_of_step(is_async=is_async, staleness=group.staleness if staleness is None else staleness)
        group.expect_step(mode)
        announce_step(stepper.last_job.next_iteration)
        # A stale step runs beside the whole next iteration, so it can wait for all gradients.
        may_overlap = mode is not StepMode.STALE and group.recovery.all_are_proven()
        job = group.issue(step_fn, mode, may_overlap)
        try:
            if job.mode is StepMode.EXACT:
                try:
                    stepper.wait_for(job)
                except BaseException:
                    stepper.forsake(job)
                    raise
                job.raise_error()
                group.recovery.raise_failures("the step was not carried out")
            return job.iteration.step_finished
        finally:
            group.end_host_graphs()

    @api_call(Scope.GROUP)
    def synchronize(self) -> None:
        """Wait for all runs and steps. Parameters then hold the newest weights, and `.grad` the gathered gradients."""
        self.group.show_newest()
        self.group.end_host_graphs()

    @api_call(Scope.GROUP, everywhere=True)
    def while_idle(self, work: Callable[[], _T]) -> _T:
        """Wait for everything, then return `work()`. No other call can begin meanwhile."""
        self.group.settle()
        return work()

    @api_call(Scope.GROUP, everywhere=True)
    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step."""
        group, stepper = self.group, self.group.stepper
        for store in group.stores:
            store.wait_until_landed(stepper.generation)
        group.recovery.raise_failures("gradients were dropped")
        stepper.wait_until_idle()  # a running step still reads the gradients of the masters
        group.recovery.drop_gradients(stepper.generation)
        for store in group.stores:
            for copy in store.masters.existing():
                copy.drop_gradient()

    @restoring_grad_mode
    def host_forward(self, forward: Callable[[], Any]) -> Any:
        """Return `forward()`, which runs on the host, calls other members and reads this model's parameters.

        Unlike other calls, this call leaves the gradients in `.grad`: autograd keeps adding to them there, in its own
        order, until a step takes them.
        """
        group = self.group
        with group.call_lock(self.name) as is_outermost:

            def run() -> Any:
                self.follow_user(adopts_gradients=False)
                group.stepper.show_visible()
                if torch.is_grad_enabled():
                    group.check_training()
                return group.recovery.undoing_buffers(group.stores, lambda: group.lock.run_user_code(forward))

            return group.everywhere(self.name, "forward()", is_outermost, (), run)

    # Weights, gradients, masters and measurements.

    @api_call(Scope.GROUP)
    def wait_for_visible_weights(self) -> None:
        """Wait until all parameters in host memory hold the version of the weights that calls read now."""
        self.group.stepper.show_visible()

    def show_gradients_without_copies(self) -> None:
        """Write the gathered gradients to `.grad` of the parameters, if the masters do not exist.

        Without copies, code that clips gradients reads `.grad` of the parameters.
        """
        group = self.group
        is_busy = group.is_closed or group.lock.is_held() or current_iteration() is not None
        if is_busy or any(store.masters.exist for store in group.stores) or not group.recovery.has_gradients():
            return
        with group.call_lock(self.name) as is_outermost:
            group.begin_call(self.name, is_outermost, group.members)
            for store in group.stores:
                store.wait_until_landed(group.stepper.generation)
                store.gradients.expose()

    @restoring_grad_mode
    def named_masters(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters of the named parameters that require grad. Makes copies that do not exist yet."""
        group = self.group
        if group.is_inherited:
            group.raise_inherited(self.name)
        owned = {id(record.param): (store, record) for store in group.stores for record in store.parameters}
        if added := next((name for name, param in named if id(param) not in owned), None):
            raise ModelChangedError(
                f"{self.name}: parameter {added!r} was added after wrapping; close() the model, then wrap it again."
            )
        in_step = group.stepper.is_current_thread()  # then no lock is held, and the user may freeze parameters
        found = [(name, *owned[id(param)]) for name, param in named]
        wanted = [each for each in found if each[2].param.requires_grad or (in_step and each[2].master is not None)]
        if not in_step and any(record.master is None for _, _, record in wanted):
            with group.call_lock(self.name) as is_outermost:
                group.begin_call(self.name, is_outermost, group.members)
                group.check_training()
                _ = [store.masters.of(record) for _, store, record in wanted]
        return one_by_one([(name, store.masters.of(record)) for name, store, record in wanted])

    @api_call(Scope.MODEL)
    def planning_profile(self) -> ModelProfile:
        """Sizes and times of the layers, as far as they are known."""
        return self._planner.profile()

    @api_call(Scope.NOTHING)
    def timeline(self) -> Timeline:
        """When each task of the most recent call ran, as the devices measured it."""
        return Timeline(()) if self._last_run is None else timeline_of(self._last_run)

    @api_call(Scope.NOTHING)
    def stats(self) -> StepStats:
        """The figures of the last step that is done. Waits neither for a step nor for calls after that step."""
        return self.group.stats(self._pool.devices() if self.group.recovery.num_runs else ())

    # The life of a member: see group.Member.

    @property
    def was_used(self) -> bool:
        """Whether the model was called or stepped."""
        return self._last_run is not None or self.group.stepper.steps_issued > 0

    @property
    def weights_read(self) -> tuple[int, int]:
        """What identifies the weights that calls read now: their version, and how often the user has written some."""
        return self.group.stepper.visible_version, self.num_writes

    def join(self, lead: ModelEngine) -> None:
        """Move this model into the group of `lead`. Must be called before the first call of this model."""
        assert not self.is_joined
        assert not self.was_used
        alone, self.group, self.is_joined = self.group, lead.group, True
        lead.group.add(self)
        lead.group.stop_requested |= alone.stop_requested
        alone.dissolve()

    def follow_user(self, *, adopts_gradients: bool = True) -> None:
        """Adopt what the user wrote into parameters, masters and `.grad`. Raises if the model's structure changed."""
        self.learn()
        store = self.store
        store.check_unchanged()
        written = store.written_by_user()
        if written:
            self.num_writes += 1
            self.group.recovery.wait_for_runs()  # uploads of these runs may read the memory that changes below
            self.group.stepper.wait_until_idle()
            store.adopt_written(written)
        if store.masters.used or store.masters.shared:
            self.num_writes += self.group.plain_loop.publish_masters(store)
        touched = store.gradients.touched_by_user() if adopts_gradients else []
        if touched:
            store.wait_until_landed(self.group.stepper.generation)
            store.gradients.adopt_touched(touched)

    def learn(self) -> None:
        """Pass the measurements of this model's finished runs to the planner, and forget these runs."""
        for run in self.group.recovery.take_finished(self.store):
            self._planner.learn(run)
            self.group.traces.append(run.trace)
        if len(self.group.traces) > _MOST_TRACES:
            self.group.read_traces()

    def plan_smaller(self) -> bool:
        """Plan with less device memory from now on. Returns whether a smaller plan exists."""
        return self._planner.plan_smaller()

    @restoring_grad_mode
    def close(self) -> None:
        """Finish pending work of the group and release its threads and pinned memory. Can be repeated."""
        self.group.close(self.name)

    def abort(self) -> None:
        """Note that the user has no reference to this model any more. Close the group if this holds for all members.

        Pending work of the group is cancelled, not finished.
        """
        self.is_unreachable = True
        self.group.abort(self.name)

    def release(self) -> None:
        """Close the store and drop all references to runs and to the device pool. Can be repeated."""
        self._last_run = None
        self.store.close()
        # A pool closes when no model refers to it any more. Calls must not hold the pool or the planner in a local
        # variable: an exception that the user keeps also keeps the frames of the call alive.
        for attribute in ("_pool", "_planner"):
            self.__dict__.pop(attribute, None)

    # Turning arguments into a request.

    def _request(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any,
        config: ResolvedRunConfig,
        loss_fn: _LossFn | None = None,
        wants_outputs: bool = True,
    ) -> Request:
        """Split the arguments into microbatches and weigh their losses. Splits the model for a new form of call."""
        prepared = PreparedCall(args, kwargs, config)
        preparing = self.split_model or self._unsplit_model
        if preparing is not None:
            prepared = preparing.prepared(args, kwargs, config, is_for_loss_alone=not wants_outputs)
        config = prepared.config
        inputs = InputSplit(prepared.args, prepared.kwargs, label, config, prepared.additions)
        whole = WholeBatch(self.group.machines, self.split_model or self.store)
        batches = self.group.lock.run_user_code(inputs.split)
        batches = self.losses.weighed(batches, inputs, loss_fn, whole, self.group.wait_until_quiet)
        if config.requires_grad:
            self.group.check_training()
        if self.split_model is not None:
            self._split_for(batches, config)
        if loss_fn is not None:
            self.store.masters.training_begins()
        compiling = None if caches_in(batches.args[0], batches.kwargs[0]) else self.compiling  # generating is eager
        return Request(batches, config, whole.call_seed(), loss_fn, wants_outputs, whole.first_microbatch, compiling)

    def _split_for(self, batches: MicrobatchInputs, config: ResolvedRunConfig) -> None:
        """Split the model again if it has no split plan for this form of call."""
        split_model = self.split_model
        assert split_model is not None
        with torch.set_grad_enabled(config.requires_grad):
            unknown = split_model.unknown_calls(batches)
            if unknown:
                # Learning runs the model's modules on the host: no step may be writing their weights.
                self.group.wait_until_quiet()
                self.learn()  # finished runs have measured the present layers, which may be replaced below
                try:
                    has_changed = split_model.learn(unknown)
                except BaseException:  # the layers may have changed before learning failed
                    self._rearrange(split_model.layers)
                    raise
                if has_changed:
                    self._rearrange(split_model.layers)

    def _rearrange(self, layers: Sequence[nn.Module]) -> None:
        """Replace the store's layers by `layers`, which have the same parameters. Makes a new planner for them."""
        stepper = self.group.stepper

        def rearrange() -> None:
            self.store.rearrange(layers, visible=stepper.visible_version, newest=stepper.steps_issued)
            self._planner = Planner(self.store, self._pool, self.name)
            self._last_run = None

        shielded(rearrange)

    # Carrying out a request.

    def _until_it_fits(self, carry_out: Callable[[Request], _T], request: Request, *, may_repeat: bool) -> _T:
        """Return `carry_out(request)`. Repeat it with a smaller plan if device memory runs out.

        Also repeats it with a new split plan if the model did not call its blocks in the order of the old one.
        may_repeat: if False, the error is raised and only the next call uses the new plan.
        """
        config, batches = request.config, request.batches
        first = batches.args[0], batches.kwargs[0]  # a call with caches has one microbatch
        caches = [CacheContents(*first)] if caches_in(*first) else []
        while True:
            try:
                return carry_out(request)
            except CallOrderChanged as error:
                with torch.set_grad_enabled(config.requires_grad):
                    has_other_plan = self.split_model is not None and self.split_model.distrust(batches)
                if not (has_other_plan and may_repeat and all(each.restore(error) for each in caches)):
                    raise error.__cause__ or error from None  # the cause, if there is one, is an error of the model
                logger.info("%s: splitting the model again, for this call: %s", self.name, error)
                self._split_for(batches, config)
            except torch.OutOfMemoryError as error:
                if not (self._planner.plan_smaller() and may_repeat and all(each.restore(error) for each in caches)):
                    raise
                logger.warning("%s: trying again with a smaller plan: %s", self.name, str(error).split(". ")[0])

    def _train(self, request: Request) -> Any:
        """Carry out forward_backward(): one run with forward, fused and backward tasks."""
        group, kind = self.group, CallKind.of(RunType.FUSED, request, self.group.timing)
        tasks = self._planner.schedule(kind, request, self._try_out)
        inputs = CallInputs(request.batches)
        call = new_call(self.store, request, inputs, tasks, self._planner.costs(kind, tasks), schedule=tasks)

        def finish(run: Run) -> Any:
            run.wait_for_losses()
            losses = summed_losses(run)
            parcels = run.take_outputs() if request.wants_outputs else []
            if run.buffer_results:
                group.recovery.commit_buffers(run)
            if not self.is_joined:
                run.require_gradients()
            outputs = self._merged(parcels, request) if request.wants_outputs else None
            # If no equal run has finished before, this one may still run out of memory. The call can be repeated only
            # before it returns, so it waits for the end of the run.
            may_not_fit = self._planner.limit_bytes is not None and not group.recovery.is_proven(run)
            if inputs.requiring_grad or may_not_fit:
                run.wait_for_success()
            if inputs.requiring_grad:
                gradients = [run.input_gradients[j] for j in range(run.num_microbatch)]
                group.lock.run_user_code(lambda: inputs.backward(gradients))
            return (losses, outputs) if request.wants_outputs else losses

        return self._carry_out(call, finish)

    def _infer(self, request: Request) -> Any:
        """Carry out forward() without grad."""
        kind = CallKind.of(RunType.INFER, request)
        tasks = self._planner.schedule(kind, request, self._try_out)
        inputs, costs = CallInputs(request.batches), self._planner.costs(kind, tasks)
        call = new_call(self.store, request, inputs, tasks, costs, phase=LayerPhase.INFERENCE)

        def finish(run: Run) -> Any:
            outputs = run.take_outputs()
            self.group.recovery.commit_buffers(run)
            return self._merged(outputs, request)

        return self._carry_out(call, finish)

    def _forward_with_grad(self, request: Request) -> Any:
        """Carry out forward() with grad: run the forward tasks now. Autograd later calls `_backward` for the others."""
        kind = CallKind.of(RunType.TRAIN, request)
        tasks = self._planner.schedule(kind, request, self._try_out)
        forward_tasks = tuple(task for task in tasks if task.kind is TaskKind.FORWARD)
        costs = self._planner.costs(kind, forward_tasks)
        inputs = CallInputs(request.batches)
        call = new_call(self.store, request, inputs, forward_tasks, costs, schedule=tasks)

        def finish(run: Run) -> Any:
            outputs = run.take_outputs()
            self.group.recovery.commit_buffers(run)
            with_grad = [t for p in outputs for t, flag in zip(p.bundle.tensors, p.requires_grad, strict=True) if flag]
            # The autograd node of the outputs keeps this partial alive, so the partial must not refer to the run. A
            # failed run refers to its exception, whose frames refer to the outputs: that would be a cycle through an
            # autograd graph, which the garbage collector never frees.
            backward = functools.partial(
                self._backward,
                kind,
                tasks[len(forward_tasks) :],
                call.recall,
                (run.version, self.num_writes),
                self.store.layers,
                inputs,
                [p.requires_grad for p in outputs],
            )
            attached = iter(attach(with_grad, inputs.requiring_grad, backward))
            for j, parcel in enumerate(outputs):
                pairs = zip(parcel.bundle.tensors, parcel.requires_grad, strict=True)
                outputs[j] = parcel.with_tensors([next(attached) if flag else tensor for tensor, flag in pairs])
            return self._merged(outputs, request)

        return self._carry_out(call, finish)

    @api_call(Scope.MODEL, everywhere=True)
    def _backward(
        self,
        kind: CallKind,
        tasks: tuple[StageTask, ...],
        recall: Recall,
        weights_read: tuple[int, int],
        layers: Sequence[LayerRecord],
        inputs: CallInputs,
        output_flags: Sequence[tuple[bool, ...]],
        gradients: tuple[torch.Tensor | None, ...],
    ) -> list[torch.Tensor | None]:
        """Run the backward pass of `_forward_with_grad` and return the gradients of the inputs. Called by autograd.

        weights_read: version and `num_writes` of the weights that the forward pass has read.
        layers: those that the forward pass has run.
        output_flags: per microbatch, which output tensors require grad.
        gradients: one gradient for each output tensor that requires grad, microbatch after microbatch.
        """
        if weights_read != self.weights_read:
            raise StaleGraphError(
                f"{self.name}: the weights were updated between this forward and its backward; call backward() before "
                "step(), and before writing to parameters."
            )
        if layers is not self.store.layers:
            raise StaleGraphError(
                f"{self.name}: between this forward and its backward, the model was split into other layers for a call "
                "with other arguments. Call backward() before such a call; after it, the layers stay as they are."
            )
        given = iter(gradients)
        parcels = [GradientParcel(tuple(next(given) if flag else None for flag in flags)) for flags in output_flags]
        call = Call(tasks, recall, self._planner.costs(kind, tasks), parcels)

        def finish(run: Run) -> list[torch.Tensor | None]:
            run.wait_for_success()
            if not self.is_joined:
                run.require_gradients()
            self.store.gradients.expose()  # as in a plain model, `.grad` is filled when backward() returns
            return inputs.select_gradients([run.input_gradients[j] for j in range(run.num_microbatch)])

        try:
            return self._carry_out(call, finish)
        except torch.OutOfMemoryError:
            self._planner.plan_smaller()
            raise

    def _try_out(self, kind: CallKind, request: Request, trial: Trial) -> None:
        """Run a trial of a call. Changes no state of the model."""
        self.group.recovery.wait_for_runs()  # a run in progress may measure what the plan needs
        self.learn()
        if trial.rehearsal is None and not self._planner.is_blind(kind):
            return

        def finish(run: Run) -> None:
            run.wait_for_success()

        self._carry_out(trial.call(self.store, request), finish)
        self._last_run = None
        self.learn()

    def _merged(self, outputs: Sequence[Parcel], request: Request) -> Any:
        """Return the merged outputs. Runs the user's merge function, if there is one."""
        return self.group.lock.run_user_code(lambda: merged(outputs, request.config, request.batches.shares))

    def _carry_out(self, call: Call, finish: Callable[[Run], _T]) -> _T:
        """Start a run of the call and return `finish(run)`. Raises a failure of this thread or of a worker."""
        stepper, recovery = self.group.stepper, self.group.recovery
        last, scope = stepper.last_job, self.group.scope
        run = self._last_run = Run(
            self.store,
            call,
            version=last.visible_version,
            generation=last.number,
            iteration=last.next_iteration,
            on_failure=recovery.run_failed,
            residence=Residence.of(scope, call, (self._planner.number, self.weights_read)) if scope else None,
        )
        own: BaseException | None = None
        try:
            recovery.watch(run)
            run.check()
            run.announce()
            self._pool.submit(run)
            # The user's kernels may still be computing the inputs. Workers upload weights while this thread waits.
            wait_for_producers([t for p in call.inputs if isinstance(p, Parcel) for t in p.bundle.tensors])
            for microbatch, parcel in enumerate(call.inputs):
                run.post(run.first_task_index, microbatch, parcel)
            result = finish(run)
            run.has_returned = True  # after a Ctrl-C before this line, the next call cleans up
            return result
        except RunCancelled:
            pass
        except BaseException as error:
            run.fail(error)
            own = error
        # This code is outside of the `except` blocks: inside, Python would make RunCancelled the failure's context.
        self._last_run = None
        recovery.raise_failures(None, own, run)
        raise AssertionError(f"{run!r} was cancelled without a failure")
