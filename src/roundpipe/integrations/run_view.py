"""RunViewCallback: a callback of transformers' Trainer that writes metrics.jsonl, shows the run and reports it.

Also works with a plain Trainer: figures that only a wrapped model measures are then null. Knows no layer and no device.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from roundpipe.api.proxy import ModelProxy
from roundpipe.host_facts import available_host_bytes, resident_bytes
from roundpipe.report.figures import figure, measured
from roundpipe.report.live_view import LiveView, RunState, View, open_view
from roundpipe.report.metrics import METRICS_FILE, RUN, MetricsWriter, RunRecord
from roundpipe.report.page import refresh_page, write_report
from roundpipe.report.refresh import REFRESH_S, Refresh
from roundpipe.stats import StepStats

logger = logging.getLogger("roundpipe")
_EARLY_STEP = 2  # the first step of a process plans and allocates; the second one is the early step of the report
_NEXT_TIMELINE = 1.25  # ratio of the step of a timeline to that of the timeline before
# What Trainer itself logs. The rest is of the method, such as rewards: the rows have it by the names in the log.
_OF_TRAINER = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "num_input_tokens_seen", "total_flos"}
_VERSIONS = ("roundpipe", "torch", "transformers", "accelerate", "peft", "trl", "datasets")


class RunViewCallback(TrainerCallback):
    """Writes one row per optimizer step to `metrics.jsonl` in the output folder, shows the run, writes its report.

    The page of the report is refreshed while the run goes on, and complete with its end.

    show: whether to show the run on the terminal. Metrics and the report are written in any case.
    about: what the run is: name, base model, method, data, price per hour. Goes to the title of the report.
    """

    def __init__(self, *, show: bool = True) -> None:
        self._show = show
        self.about: dict[str, Any] = {}
        self._writer: MetricsWriter | None = None
        self._view: View | None = None
        self._refresh = Refresh(lambda: None)
        self._record = RunRecord()
        self._state = RunState()
        self._folder = Path()
        self._pending: dict[str, Any] | None = None  # the row of the last step, while its log is still to come
        self._loss: torch.Tensor | None = None
        self._num_tokens: int | None = 0
        self._tokens_seen = 0
        self._grad_norm: float | torch.Tensor | None = None
        self._lr: float | None = None
        self._since_s = 0.0  # when the present step began
        self._steps_done = 0  # of this process
        self._timeline_at = _EARLY_STEP
        self._write_fails = False

    @property
    def run_state(self) -> RunState:
        """What the view shows."""
        return self._state

    def show_note(self, note: str) -> bool:
        """Add a line to the live view and return True; False if there is no live view. Works in a signal handler."""
        if not isinstance(self._view, LiveView):
            return False
        self._state.note = note
        return True

    def show_text(self, text: str) -> None:
        """Write a line beside the view, if the run is shown."""
        if self._view is not None:
            self._try_view(self._view.write, text)

    # Called by the training step.

    def note_loss(self, loss: torch.Tensor, num_tokens: int | None = None) -> None:
        """Add the loss of one call, of which an optimizer step may have several. Does not wait for a device."""
        loss = loss.detach().double()
        self._loss = loss if self._loss is None else self._loss + loss
        self._num_tokens = None if num_tokens is None or self._num_tokens is None else self._num_tokens + num_tokens

    def note_grad_norm(self, grad_norm: float | torch.Tensor | None) -> None:
        """Set the norm of the gradients of the present step. Without it the rows have the norms that Trainer logs."""
        self._grad_norm = grad_norm

    # Called by the Trainer.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self.close()
        model = kwargs.get("model")
        self._folder = Path(args.output_dir or ".")
        self._writer = MetricsWriter(self._folder / METRICS_FILE, resumed_step=state.global_step)
        self._record = RunRecord.resumed(self._folder, state.global_step)
        self._record.settings = ({RUN: self.about} if self.about else {}) | _settings(args, model)
        self._record.max_steps = state.max_steps if state.max_steps > 0 else None
        self._record.starts.append({"step": state.global_step, "time": time.time(), "devices": []})
        self._record.write(self._folder)
        self._state = RunState(args.run_name or self.about.get("name") or _name_of(model), self._record.max_steps)
        self._refresh = Refresh(functools.partial(_refresh_page, self._folder))
        self._view = self._opened_view() if self._show else None
        self._write_fails = False
        self._steps_done, self._timeline_at = 0, _EARLY_STEP
        self._tokens_seen = int(state.num_input_tokens_seen or 0)
        self._forget_step()
        self._since_s = time.perf_counter()
        atexit.register(self.close)  # Trainer does not call on_train_end after an error

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs.get("optimizer")  # the scheduler changes the rate before on_step_end
        self._lr = None if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._writer is None:
            return
        now_s = time.perf_counter()
        model = kwargs.get("model")
        stats = model.stats() if isinstance(model, ModelProxy) else None
        self._pending = self._row(state, stats, now_s - self._since_s)
        self._steps_done += 1
        if isinstance(model, ModelProxy):
            self._keep_timeline(model, state, control, stats)
        self._forget_step()
        self._since_s = now_s
        # Trainer logs right after this, before it saves: so the row is complete before a checkpoint of this step is.
        if not control.should_log:
            self._write_pending()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        row = self._pending
        if row is None or logs is None or "loss" not in logs:
            return
        if row["loss"] is None and args.logging_steps == 1:  # otherwise it is a mean of several steps
            row["loss"] = logs["loss"]
        row["grad_norm"] = logs.get("grad_norm") if row["grad_norm"] is None else row["grad_norm"]
        of_method = {name: value for name, value in logs.items() if name not in _OF_TRAINER and name not in row}
        row |= {name: value for name, value in of_method.items() if isinstance(value, (int, float))}
        self._write_pending()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._write_pending()
        if self._writer is not None and metrics is not None:
            row = {"type": "eval", "step": state.global_step, "epoch": state.epoch, "time": time.time(), **metrics}
            self._write(row)
            self._show_state(f"eval_loss {figure(metrics.get('eval_loss'))}")
            self._refresh.offer(is_event=True)
        self._since_s = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_pending()
        self._state.checkpoint, self._state.checkpoint_time = f"checkpoint-{state.global_step}", time.time()
        self._show_state(f"saved {self._state.checkpoint}")
        if self._writer is not None:
            self._refresh.offer(is_event=True)
        self._since_s = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the view and write the report. Call it also when training ends with an error. Can be repeated."""
        if self._writer is None:
            return
        atexit.unregister(self.close)
        self._write_pending()
        self._writer.close()
        self._writer = None
        if self._view is not None:
            self._try_view(self._view.close)
            self._view = None
        self._refresh.close()
        self._record.ended = time.time()
        self._write_report()

    def _write_report(self) -> None:
        """Write run.json and the report. A failure is logged: it must not fail the training."""
        try:
            self._record.write(self._folder)
            if (self._folder / METRICS_FILE).stat().st_size:
                logger.info("The report of the run is %s.", write_report(self._folder))
        except Exception as error:
            logger.error(
                "The report of the run in %s could not be written: %s: %s. Its metrics are kept; "
                "roundpipe.report.write_report(folder) writes the report from them.",
                self._folder,
                type(error).__name__,
                error,
            )

    # Rows.

    def _row(self, state: TrainerState, stats: StepStats | None, step_s: float) -> dict[str, Any]:
        """The row of the step that has just ended."""
        tokens = self._num_tokens if self._loss is not None else None
        seen = int(state.num_input_tokens_seen or 0)
        if tokens is None and seen > self._tokens_seen:
            tokens = seen - self._tokens_seen
        self._tokens_seen = seen
        if tokens is None and stats is not None:
            tokens = stats.tokens
        norm = self._grad_norm
        return {
            "type": "train",
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": None if self._loss is None else self._loss.item(),
            "grad_norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
            "lr": self._lr,
            "tokens": tokens,
            "tokens_per_s": None if tokens is None or step_s <= 0 else tokens / step_s,
            "step_s": step_s,
            **measured(stats),
            **({} if stats is not None else _host_memory()),
            "time": time.time(),
        }

    def _write_pending(self) -> None:
        row, self._pending = self._pending, None
        if row is not None and self._writer is not None:
            self._write(row)
            self._show_state()
            self._refresh.offer()

    def _write(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics. A failure is logged, the first one of several: it must not fail the training."""
        assert self._writer is not None
        self._state.add(row)
        try:
            self._writer.write(row)
            self._write_fails = False
        except OSError as error:
            if not self._write_fails:
                logger.error("%s misses rows from step %d on: %s.", self._writer.path, row["step"], error)
            self._write_fails = True

    # The view. Its failure, such as a closed pipe or an encoding without its signs, must not fail the training.

    def _opened_view(self) -> View | None:
        try:
            return open_view(self._state)
        except (OSError, ValueError) as error:
            logger.warning("The run cannot be shown: %s. Training goes on.", error)
            return None

    def _show_state(self, event: str | None = None) -> None:
        if self._view is not None:
            self._try_view(self._view.update, self._state, event)

    def _try_view(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except (OSError, ValueError) as error:  # ValueError: also a closed stream and UnicodeEncodeError
            logger.warning("The run is not shown any more: %s. Training goes on.", error)
            self._view = None

    def _forget_step(self) -> None:
        self._loss, self._num_tokens, self._grad_norm, self._lr = None, 0, None, None

    def _keep_timeline(
        self, model: ModelProxy, state: TrainerState, control: TrainerControl, stats: StepStats | None
    ) -> None:
        """Keep the timeline of an early step, and now and then of a later one. Reading it waits for the devices."""
        if self._steps_done == 1 and stats is not None:
            self._record.starts[-1]["devices"] = list(stats.device_share)
        is_last = control.should_training_stop or state.global_step == state.max_steps
        timeline = getattr(model, "timeline", None)
        if (self._steps_done >= self._timeline_at or is_last) and timeline is not None:
            self._timeline_at = max(int(self._steps_done * _NEXT_TIMELINE), self._steps_done + 1)
            self._record.keep_timeline(state.global_step, timeline())
            self._record.write(self._folder)  # a report after a kill has the devices and timelines, too


def _refresh_page(folder: Path) -> None:
    refresh_page(folder, int(REFRESH_S))


def _host_memory() -> dict[str, int | None]:
    """What is known of a step of a plain model, beside the figures of its trainer."""
    return {"host_rss_bytes": resident_bytes(), "host_available_bytes": available_host_bytes()}


# Settings of the run.


def _name_of(model: nn.Module | None) -> str:
    plain = model.original_model if isinstance(model, ModelProxy) else model
    return "training" if plain is None else type(plain).__name__


def _settings(args: TrainingArguments, model: nn.Module | None) -> dict[str, dict[str, Any]]:
    """The settings that a report shows."""
    of_model: dict[str, Any] = {"class": _name_of(model)}
    if model is not None:
        params = list(model.parameters())
        of_model["parameters"] = sum(param.numel() for param in params)
        of_model["trained parameters"] = sum(param.numel() for param in params if param.requires_grad)
        of_model["dtype"] = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params}))
        if isinstance(model, ModelProxy):
            of_model["layers"] = getattr(model, "num_layers", None)
            of_model["optimizer dtype"] = str(getattr(model, "optim_dtype", None) or "as the parameters")
    machine = {"python": platform.python_version(), "system": platform.platform(), "threads": torch.get_num_threads()}
    return {"model": of_model, "arguments": args.to_dict(), "versions": _versions() | machine}


def _versions() -> dict[str, Any]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
