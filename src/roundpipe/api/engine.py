"""Everything behind one wrapped model: its store, its share of the pool, its optimizer thread, its calls.

Owned by api.model.RoundPipe, and outlives it only until its finalizer has closed it. Methods are the verbs of the
public API; each enters through `_entered`, which serialises calls and surfaces failures of the background.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.api.calls import CallInputs, merged, split_inputs, summed_losses
from roundpipe.api.planning import Planner
from roundpipe.api.recovery import Recovery
from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.context import LayerPhase, announce_step, current_iteration
from roundpipe.devices import HostPinner
from roundpipe.errors import ClosedError, StaleGraphError, UsageError
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

logger = logging.getLogger("roundpipe")


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
        self.store = LayerStore(
            layers, names, optim_dtype=optim_dtype, pin_mode=pin_mode, pinner=pinner, monitor=pool.monitor
        )
        self.stepper = Stepper(self.store)
        self._planner = Planner(self.store, pool.num_devices, name)
        self._recovery = Recovery(self.store, self.stepper)
        self._lock = threading.RLock()
        self._last_run: Run | None = None
        self._closed = False

    @property
    def num_devices(self) -> int:
        return self._pool.num_devices

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
            inputs = CallInputs(batches)
            run.labels = inputs.label_bundles()
            with self._carried_out(run, inputs):
                run.wait_for_losses()
                losses = summed_losses(run)
                outputs = merged(run, config) if return_outputs else None
                self._recovery.commit_buffers(run)
                if inputs.any_requires_grad:
                    run.wait_until_finished()
                    run.check()
                    inputs.backward([run.input_gradients[j] for j in range(run.num_microbatch)])
            return (losses, outputs) if return_outputs else losses

    def step(self, step_fn: Callable[[], object], is_async: bool) -> None:
        with self._entered():
            announce_step(self.stepper.iteration)
            job = self.stepper.issue(step_fn, is_async)
            if is_async:
                return
            self.stepper.wait_for(job)
            if job.error is not None:
                raise job.error
            self._raise_failures("the step was not carried out")

    def synchronize(self) -> None:
        with self._entered():
            self._settle()
            self.store.gradients.expose()

    def zero_grad(self) -> None:
        with self._entered():
            self.store.wait_until_landed(self.stepper.generation)
            self._raise_failures("gradients were dropped")
            self.store.gradients.drop()
            self.store.gradients.expose()

    def named_masters(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's copies of those parameters that require grad, made where they do not exist yet."""
        by_param = {id(record.param): record for record in self.store.parameters}
        missing = [p for _, p in named if p.requires_grad and by_param[id(p)].master is None]
        if missing and not self.stepper.is_current_thread():
            with self._entered():
                for param in missing:
                    self.store.masters.of(by_param[id(param)])
        return iter([(name, self.store.masters.of(by_param[id(p)])) for name, p in named if p.requires_grad])

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
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._settle()
            except Exception:
                logger.exception("%s: a failure in the background came to light when the model was closed", self.name)
            self._shut_down()

    def abort(self) -> None:
        """Close without finishing anything: for a model nobody can reach any more, and at exit."""
        if not self._closed:
            self._closed = True
            self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
            self._shut_down()

    # Parts of a call.

    def _infer(self, batches: MicrobatchInputs, config: ResolvedRunConfig) -> Any:
        tasks = self._schedule(RunType.INFER, len(batches), config)
        run = self._new_run(tasks, len(batches), self._new_recall((), config), LayerPhase.INFERENCE)
        with self._carried_out(run, CallInputs(batches)):
            run.wait_for_outputs()
            self._recovery.commit_buffers(run)
            return merged(run, config)

    def _forward_with_grad(self, batches: MicrobatchInputs, config: ResolvedRunConfig) -> Any:
        tasks = self._schedule(RunType.TRAIN, len(batches), config)
        forward_tasks = tuple(task for task in tasks if task.kind is TaskKind.FORWARD)
        recall = self._new_recall(tasks, config)
        run = self._new_run(forward_tasks, len(batches), recall, LayerPhase.FORWARD)
        inputs = CallInputs(batches)
        with self._carried_out(run, inputs):
            run.wait_for_outputs()
            self._recovery.commit_buffers(run)
            outputs = [run.outputs[j] for j in range(run.num_microbatch)]
            with_grad = [t for p in outputs for t, flag in zip(p.bundle.tensors, p.requires_grad, strict=True) if flag]
            backward = functools.partial(
                self._backward, tasks[len(forward_tasks) :], run, inputs, [p.requires_grad for p in outputs]
            )
            attached = iter(attach(with_grad, inputs.requiring_grad(), backward))
            for j, parcel in enumerate(outputs):
                pairs = zip(parcel.bundle.tensors, parcel.requires_grad, strict=True)
                run.outputs[j] = parcel.with_tensors([next(attached) if flag else tensor for tensor, flag in pairs])
            return merged(run, config)

    def _backward(
        self,
        tasks: Sequence[StageTask],
        forward_run: Run,
        inputs: CallInputs,
        output_flags: Sequence[tuple[bool, ...]],
        gradients: tuple[torch.Tensor | None, ...],
    ) -> list[torch.Tensor | None]:
        """Called by autograd with the gradients of all microbatches' outputs; returns those of the inputs."""
        with self._entered():
            if forward_run.version != self.stepper.visible_version:
                raise StaleGraphError(
                    f"{self.name}: the weights were updated between this forward (version {forward_run.version}) and "
                    f"its backward (version {self.stepper.visible_version}); call backward() before step()."
                )
            run = self._new_run(tasks, forward_run.num_microbatch, forward_run.recall, LayerPhase.FORWARD)
            given = iter(gradients)
            parcels = [GradientParcel(tuple(next(given) if flag else None for flag in flags)) for flags in output_flags]
            with self._carried_out(run, parcels):
                run.wait_until_finished()
                run.check()
                return inputs.select_gradients([run.input_gradients[j] for j in range(run.num_microbatch)])

    def _schedule(self, run_type: RunType, num_microbatch: int, config: ResolvedRunConfig) -> tuple[StageTask, ...]:
        plan: ModelExecutePlan = self._planner.plan(run_type, num_microbatch, config, self._pool.devices()[0])
        return build_schedule(plan, run_type)

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

    @contextlib.contextmanager
    def _carried_out(self, run: Run, inputs: CallInputs | Sequence[GradientParcel]) -> Iterator[None]:
        """Start the run; whatever goes wrong until the block is left, here or on a worker, ends it and is raised."""
        self._last_run = run
        self._recovery.watch(run)
        try:
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
        # Outside the handlers, so that the failure is raised as it came and not as a consequence of our own signal.
        self._raise_failures(None)

    # Entering and leaving.

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        if self.stepper.is_current_thread() or current_iteration() is not None:
            raise UsageError(f"{self.name} was called from inside step_fn, loss_fn or a layer; call it outside.")
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} was closed; wrap the model again to go on using it.")
            self._raise_failures("it happened in the background after the call that caused it had returned")
            for run in self._recovery.take_finished():
                self._planner.learn(run)
            self.store.check_unchanged()
            self._follow_user()
            yield

    def _follow_user(self) -> None:
        """What the user did to parameters and gradients between calls is as good as what we did."""
        written = self.store.written_by_user()
        if written:
            self.stepper.wait_until_idle()
            self.store.adopt_written(written)
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

    def _raise_failures(self, remark: str | None) -> None:
        self._recovery.raise_failures(remark)

    def _shut_down(self) -> None:
        self.stepper.close()
        self._recovery.forget_finished()
        self.store.close()


def _require_grad_mode(config: ResolvedRunConfig) -> None:
    if not config.requires_grad:
        raise UsageError(
            "forward_backward() needs gradients, but they are off (torch.no_grad() or requires_grad=False); "
            "call forward() for inference."
        )
