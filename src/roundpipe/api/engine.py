"""Everything behind one wrapped model: its store, its share of the pool, its optimizer thread, its calls.

Owned by api.model.RoundPipe, and outlives it only until its finalizer has closed it. Methods are the verbs of the
public API; each enters through `_entered`, which serialises calls and surfaces failures of the background.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.api.calls import CallInputs, merged, split_inputs, summed_losses
from roundpipe.api.entering import entering
from roundpipe.api.planning import Planner
from roundpipe.api.recovery import Recovery
from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.context import LayerPhase, announce_step, current_iteration
from roundpipe.devices import HostPinner
from roundpipe.errors import ClosedError, ModelChangedError, StaleGraphError, UsageError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.optim.stepper import Stepper
from roundpipe.plan import ModelExecutePlan, ModelProfile, RunType, StageTask, TaskKind, build_schedule
from roundpipe.runtime.ambient import Ambient
from roundpipe.runtime.autograd import attach
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.replica import LayerSettings
from roundpipe.runtime.run import GradientParcel, Parcel, Recall, Run, RunCancelled
from roundpipe.runtime.seeds import draw_call_seed
from roundpipe.store import LayerStore, PinMode
from roundpipe.timeline import Span, Timeline
from roundpipe.waiting import watchdog_limit_s

logger = logging.getLogger("roundpipe")
_FAILURES_HEARD_OUT = 10  # by close(), which logs failures of the background one after the other


class ModelEngine:
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
        self.name = name
        self._pool = pool
        self.num_devices = pool.num_devices
        self.store = LayerStore(
            layers, names, optim_dtype=optim_dtype, pin_mode=pin_mode, pinner=pinner, monitor=pool.monitor
        )
        self.stepper = Stepper(self.store)
        self._planner = Planner(self.store, pool.num_devices, name)
        self._recovery = Recovery(self.stepper, pool.monitor)
        self._lock = threading.RLock()
        self._last_run: Run | None = None
        self._steps_are_exact = False  # the last one was; the next one most likely is what that was
        self._joined: list[ModelEngine] = []  # all that share steps, failures and lock; empty where this one is alone
        self._closed = False
        self._unreachable = False

    def join(self, lead: ModelEngine) -> None:
        """Be stepped together with `lead` and its members, fail and close with them. Only before the first call."""
        assert not self._joined
        assert self._last_run is None
        lead.stepper.add(self.store)
        lead._joined[:] = [*lead._members, self]
        self.stepper, self._recovery = lead.stepper, lead._recovery
        self._lock, self._joined = lead._lock, lead._joined

    @property
    def _members(self) -> list[ModelEngine]:
        return self._joined or [self]

    @property
    def is_closed(self) -> bool:
        return self._closed

    # The calls.

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: ResolvedRunConfig) -> Any:
        with self._entered():
            batches = split_inputs(args, kwargs, None, dataclasses.replace(config, split_label=None))
            if not config.requires_grad:
                return self._infer(batches, config)
            return self._forward_with_grad(batches, config)

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: ResolvedRunConfig,
    ) -> Any:
        with self._entered():
            _require_grad_mode(config)
            batches = split_inputs(args, kwargs, label, config)
            tasks = self._schedule(RunType.FUSED, len(batches), config)
            run = self._new_run(tasks, len(batches), self._new_recall(tasks, config), LayerPhase.FORWARD)
            run.loss_fn, run.wants_outputs = loss_fn, return_outputs
            if self._steps_are_exact:
                run.tail = self._planner.tail(tasks, len(batches), config, self._pool.devices()[0])
            inputs = CallInputs(batches)
            run.labels = inputs.label_bundles()
            run.signature = (tasks, run.tail, config.recompute_grain, inputs.shapes())
            with self._carried_out(run, inputs):
                run.wait_for_losses()
                losses = summed_losses(run)
                outputs = merged(run.take_outputs(), config) if return_outputs else None
                self._recovery.commit_buffers(run)
                if inputs.any_requires_grad:
                    run.wait_until_finished()
                    run.check()
                    inputs.backward([run.input_gradients[j] for j in range(run.num_microbatch)])
            return (losses, outputs) if return_outputs else losses

    def step(self, step_fn: Callable[[], object], is_async: bool) -> None:
        with self._entered(*self._members):
            for member in self._members:
                member.store.gradients.conceal()
                member._steps_are_exact = not is_async
            announce_step(self.stepper.iteration)
            # An asynchronous step has the next iteration's time: it need not begin before its gradients are whole.
            may_overlap = not is_async and self._recovery.all_are_proven()
            job = self.stepper.issue(step_fn, is_async, may_overlap)
            if is_async:
                return
            try:
                self.stepper.wait_for(job)
            except BaseException:
                self.stepper.forsake(job)
                raise
            if job.error is not None:
                raise job.error
            self._raise_failures("the step was not carried out")

    def synchronize(self) -> None:
        with self._entered(*self._members):
            self._settle()
            for member in self._members:
                member.store.gradients.expose()

    def wait_for_visible_weights(self) -> None:
        """Until the weights in host memory are of one version: the one calls read now."""
        with self._entered(*self._members):
            self._wait_for_visible_weights()

    @entering
    def host_forward(self) -> Iterator[None]:
        """Around a forward on the host that calls other members and reads this engine's parameters where they lie.

        Gradients that autograd has put on the latter stay with it until a step takes them, so that they are summed in
        its order.
        """
        with self._serialised():
            self.store.check_unchanged()
            self._follow_writes()
            self._wait_for_visible_weights()
            with self._recovery.undoing_buffers([member.store for member in self._members]):
                yield

    def zero_grad(self) -> None:
        with self._entered(*self._members):
            for member in self._members:
                member.store.wait_until_landed(self.stepper.generation)
            self._raise_failures("gradients were dropped")
            for member in self._members:
                member.store.gradients.drop()

    def named_masters(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's copies of those parameters that require grad, made where they do not exist yet."""
        owned = {
            id(record.param): (member.store, record) for member in self._members for record in member.store.parameters
        }
        for name, param in named:
            if id(param) not in owned:
                raise ModelChangedError(
                    f"{self.name}: parameter {name!r} was added after wrapping; close() the model, then wrap it again."
                )
        wanted = [(name, *owned[id(param)]) for name, param in named if param.requires_grad]
        if any(record.master is None for _, _, record in wanted) and not self.stepper.is_current_thread():
            with self._entered(*self._members):
                for _, store, record in wanted:
                    store.masters.of(record)
        return iter([(name, store.masters.of(record)) for name, store, record in wanted])

    def planning_profile(self) -> ModelProfile:
        with self._entered():
            limit = self._pool.devices()[0].memory_limit_bytes()
            return self._planner.profile(self.num_devices + 1, limit)

    def timeline(self) -> Timeline:
        """What ran when in the most recent call, as the devices measured it."""
        with self._entered():
            run = self._last_run
            if run is None:
                return Timeline(())
            run.wait_until_finished()
            spans = [Span(s.device, s.label, s.microbatch, s.start.seconds(), s.end.seconds()) for s in run.spans]
            return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))

    def close(self) -> None:
        """Finish what is pending, then let go of threads and pinned memory. Never raises what the background did."""
        self._refuse_inside_user_code("closed")
        with self._lock:
            if self._closed:
                return
            try:
                for _ in range(_FAILURES_HEARD_OUT):
                    if self._settles():
                        break
            finally:  # also when interrupted: then nothing more is waited for
                self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
                self._shut_down()

    def abort(self) -> None:
        """Close without finishing anything: for a model nobody can reach any more, and at exit."""
        self._unreachable = True
        if not self._closed and all(member._unreachable for member in self._members):
            self._recovery.log_failures("when nobody could reach the model any more")
            self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
            self._shut_down()

    # Parts of a call.

    def _infer(self, batches: MicrobatchInputs, config: ResolvedRunConfig) -> Any:
        tasks = self._schedule(RunType.INFER, len(batches), config)
        run = self._new_run(tasks, len(batches), self._new_recall((), config), LayerPhase.INFERENCE)
        with self._carried_out(run, CallInputs(batches)):
            outputs = run.take_outputs()
            self._recovery.commit_buffers(run)
            return merged(outputs, config)

    def _forward_with_grad(self, batches: MicrobatchInputs, config: ResolvedRunConfig) -> Any:
        tasks = self._schedule(RunType.TRAIN, len(batches), config)
        forward_tasks = tuple(task for task in tasks if task.kind is TaskKind.FORWARD)
        recall = self._new_recall(tasks, config)
        run = self._new_run(forward_tasks, len(batches), recall, LayerPhase.FORWARD)
        inputs = CallInputs(batches)
        with self._carried_out(run, inputs):
            outputs = run.take_outputs()
            self._recovery.commit_buffers(run)
            with_grad = [t for p in outputs for t, flag in zip(p.bundle.tensors, p.requires_grad, strict=True) if flag]
            # The node of the outputs keeps this alive. It must not reach the run: a run that fails keeps its exception,
            # whose frames keep the outputs, and no collector sees a cycle that goes through autograd's graph.
            backward = functools.partial(
                self._backward,
                tasks[len(forward_tasks) :],
                recall,
                run.version,
                inputs,
                [p.requires_grad for p in outputs],
            )
            attached = iter(attach(with_grad, inputs.requiring_grad(), backward))
            for j, parcel in enumerate(outputs):
                pairs = zip(parcel.bundle.tensors, parcel.requires_grad, strict=True)
                outputs[j] = parcel.with_tensors([next(attached) if flag else tensor for tensor, flag in pairs])
            return merged(outputs, config)

    def _backward(
        self,
        tasks: Sequence[StageTask],
        recall: Recall,
        version: int,
        inputs: CallInputs,
        output_flags: Sequence[tuple[bool, ...]],
        gradients: tuple[torch.Tensor | None, ...],
    ) -> list[torch.Tensor | None]:
        """Called by autograd with the gradients of all microbatches' outputs; returns those of the inputs."""
        with self._entered():
            if version != self.stepper.visible_version:
                raise StaleGraphError(
                    f"{self.name}: the weights were updated between this forward (version {version}) and "
                    f"its backward (version {self.stepper.visible_version}); call backward() before step()."
                )
            run = self._new_run(tasks, len(output_flags), recall, LayerPhase.FORWARD)
            given = iter(gradients)
            parcels = [GradientParcel(tuple(next(given) if flag else None for flag in flags)) for flags in output_flags]
            with self._carried_out(run, parcels):
                run.wait_until_finished()
                run.check()
                return inputs.select_gradients([run.input_gradients[j] for j in range(run.num_microbatch)])

    def _schedule(self, run_type: RunType, num_microbatch: int, config: ResolvedRunConfig) -> tuple[StageTask, ...]:
        device = self._pool.devices()[0]
        if self._planner.is_blind(run_type, num_microbatch, device):
            self._recovery.wait_for_runs()  # one of them may be measuring just what the plan needs
            self._learn()
        plan: ModelExecutePlan = self._planner.plan(run_type, num_microbatch, config, device)
        return build_schedule(plan, run_type)

    def _learn(self) -> None:
        for run in self._recovery.take_finished(self.store):
            self._planner.learn(run)

    def _new_recall(self, tasks: Sequence[StageTask], config: ResolvedRunConfig) -> Recall:
        recomputed = [task.layers for task in tasks if task.kind is TaskKind.BACKWARD]
        by_layer = config.recompute_grain is RecomputeGrain.LAYER
        layers = self.store.layers
        return Recall(
            seed=draw_call_seed(),
            ambient=Ambient.capture(),
            preserve_rng_state=config.preserve_rng_state,
            grain=config.recompute_grain,
            settings=[LayerSettings.of(layer) for layer in layers],
            frozen_buffers={layer.layer_id: [b.frozen() for b in layer.buffers] for layer in layers if layer.buffers},
            save_points=frozenset(i for stage in recomputed for i in (stage if by_layer else stage[:1])),
        )

    def _new_run(self, tasks: Sequence[StageTask], num_microbatch: int, recall: Recall, phase: LayerPhase) -> Run:
        return Run(
            self.store,
            tasks,
            num_microbatch,
            recall,
            forward_phase=phase,
            version=self.stepper.visible_version,
            generation=self.stepper.generation,
            iteration=self.stepper.iteration,
            on_failure=self._recovery.run_failed,
        )

    @entering
    def _carried_out(self, run: Run, inputs: CallInputs | Sequence[GradientParcel]) -> Iterator[None]:
        """Start the run; whatever goes wrong until the block is left, here or on a worker, ends it and is raised."""
        self._last_run = run
        own: BaseException | None = None
        try:
            self._recovery.watch(run)
            run.check()
            run.announce()
            self._pool.submit(run)
            parcels: Sequence[Parcel | GradientParcel] = inputs.parcels() if isinstance(inputs, CallInputs) else inputs
            for microbatch, parcel in enumerate(parcels):
                run.post(run.first_task_index, microbatch, parcel)
            yield
            return
        except RunCancelled:
            pass
        except BaseException as error:
            run.fail(error)
            own = error
        # Outside the handlers, so that the failure is raised as it came and not as a consequence of our own signal.
        self._last_run = None
        self._recovery.raise_failures(None, own)

    # Entering and leaving.

    @entering
    def _entered(self, *members: ModelEngine) -> Iterator[None]:
        """`members`: whose parameters and gradients the call is about; this engine's alone by default."""
        with self._serialised():
            for member in members or (self,):
                member._learn()
                member.store.check_unchanged()
                member._follow_writes()
                member._follow_gradients()
            yield

    @entering
    def _serialised(self) -> Iterator[None]:
        self._refuse_inside_user_code("called")
        watchdog_limit_s()  # a limit that cannot be read is refused here, before any thread meets it
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} was closed; wrap the model again to go on using it.")
            self._raise_failures("it happened in the background after the call that caused it had returned")
            yield

    def _refuse_inside_user_code(self, what: str) -> None:
        """Whoever calls from there would wait for itself."""
        if self.stepper.is_current_thread() or current_iteration() is not None:
            raise UsageError(f"{self.name} was {what} from inside step_fn, loss_fn or a layer; do that outside.")

    def _follow_writes(self) -> None:
        """What the user did to parameters between calls is as good as what we did."""
        written = self.store.written_by_user()
        if written:
            self.stepper.wait_until_idle()
            self.store.adopt_written(written)

    def _follow_gradients(self) -> None:
        touched = self.store.gradients.touched_by_user()
        if touched:
            self.store.wait_until_landed(self.stepper.generation)
            self.store.gradients.adopt_touched(touched)

    def _settle(self) -> None:
        """Wait for everything and make the newest weights the visible ones."""
        self._recovery.wait_for_runs()
        self._raise_failures("it happened in the background after the call that caused it had returned")
        self.stepper.wait_until_idle()
        self._raise_failures("it happened in the background after the call that caused it had returned")
        self.stepper.publish_latest()
        for member in self._members:
            member._learn()  # which lets go of the runs

    def _settles(self) -> bool:
        """Whether all went well; if not, there may be more to wait for behind the failure, which is only logged."""
        try:
            self._settle()
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("%s: a failure in the background came to light when the model was closed", self.name)
            return False
        return True

    def _wait_for_visible_weights(self) -> None:
        self.stepper.show_visible()

    def _raise_failures(self, remark: str | None) -> None:
        self._recovery.raise_failures(remark)

    def _shut_down(self) -> None:
        self.stepper.close()
        self._recovery.forget_finished()
        for member in self._members:
            member._closed = True
            member._last_run = None
            member.store.close()
            del member._pool  # the last model to let go closes it


def _require_grad_mode(config: ResolvedRunConfig) -> None:
    if not config.requires_grad:
        raise UsageError(
            "forward_backward() needs gradients, but they are off (torch.no_grad() or requires_grad=False); "
            "call forward() for inference."
        )
