"""The run of `roundpipe train`: checks before the model is loaded, dry run, training, signals, what is said at the end.

Knows the order of a run. Options are checked in cli.arguments, data in cli.rows and cli.data; the trainer trains.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from roundpipe.checkpoint import latest, verify
from roundpipe.checkpoint.folders import check_parent
from roundpipe.cli.adapters import adapter_digest, put_adapter
from roundpipe.cli.arguments import TrainSettings, read_yaml, split_weight
from roundpipe.cli.classes import accuracy
from roundpipe.cli.console import one_line, plain_output, say
from roundpipe.cli.launch import Launch, is_restart
from roundpipe.cli.methods import Head, Method
from roundpipe.cli.option_kinds import OnResume
from roundpipe.cli.options import OPTIONS, option
from roundpipe.cli.preparation import (
    Needs,
    Prepared,
    check_out,
    lora_config,
    memory_needs,
    model_class,
    model_options,
    new_model,
    prepare,
    report_dry_run,
)
from roundpipe.cli.rewards import with_whole_path
from roundpipe.cli.show_data import show_rows
from roundpipe.cli.watching import about, early_stopping, how_it_stopped, what_next
from roundpipe.errors import CheckpointError, ConfigError, DeviceError, MachineError
from roundpipe.loading import fill, local_folder
from roundpipe.monitor import WAIT_LIMIT_VARIABLE
from roundpipe.packed import checked_form
from roundpipe.progress import phase, watched_by
from roundpipe.report.metrics import replace_file

logger = logging.getLogger("roundpipe")

_LOCK_FILE = ".train.lock"  # in the output folder: locked by the process that trains there
_DATA_FILE = ".data.sha256"  # in the output folder: a checksum of the rows of the run
_HEADS = ("score", "classifier")  # modules of models for sequences that those for tokens do not have
_STATE_FILE = "trainer_state.json"  # in every checkpoint of a trainer
_CHECKPOINT = "checkpoint-"  # the names of a trainer's checkpoints begin so, and end with the step
SETTINGS_FILE = "train.yaml"  # in the output folder: the options of the run, for --config
_STOPPING = "stopping after this step; press Ctrl-C again to stop at once"


def run(settings: TrainSettings) -> int:
    """Do what the settings ask for. Returns the exit code of the command."""
    with Launch.joined() as launch:
        if launch.size > 1:
            # accelerate then exchanges its metrics in host memory. RoundPipe trains on the GPUs all the same.
            settings = dataclasses.replace(settings, trainer={**settings.trainer, "use_cpu": True})
        return _run(settings, launch)


def _run(settings: TrainSettings, launch: Launch) -> int:
    """As `run`, on one of the machines of the run."""

    def look() -> Path | None:
        if not launch.is_first:
            return None
        if not settings.dry_run and (settings.out / _LOCK_FILE).exists():
            with _held(settings.out):
                pass  # refuses at once what it would refuse below, where the data is prepared
        check_out(settings)
        start = starting_point(settings)
        check_parent(settings.out, _CHECKPOINT, after=_step_of(start))
        return start

    def check() -> tuple[Prepared, Needs]:
        prepared = prepare(settings, launch.size)
        return prepared, memory_needs(settings, prepared)

    checkpoint = launch.together("looking for checkpoints", look)
    prepared, needs = launch.together("preparing the run", check)
    launch.require_equal(_equal_settings(settings, prepared))
    if settings.dry_run:
        report_dry_run(settings, prepared, needs, checkpoint)
        show_rows(prepared.data.train, prepared.tokenizer, 2, settings.trainer["max_length"])
    launch.together("checking the memory", lambda: needs.require(settings))
    if settings.dry_run:
        say("dry run: all checks passed; nothing was trained")
        return 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(_wait_limit(settings.wait_limit_s))
        stack.enter_context(watched_by(say))

        def begin() -> str | None:
            if not launch.is_first:
                return None
            settings.out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_held(settings.out))
            checkpoint = starting_point(settings)  # again: another process may have trained there until now
            if checkpoint is not None:
                say(f"the run goes on from {checkpoint}")
                _warn_of_changes(settings, prepared)
            return None if checkpoint is None else str(checkpoint)

        found = launch.of_first(launch.together("starting", begin))
        return _train(settings, prepared, None if found is None else _here(Path(found), settings), launch)


def _here(checkpoint: Path, settings: TrainSettings) -> Path:
    """The checkpoint that rank 0 has found: on this machine, --out may have another path."""
    beside = settings.out / checkpoint.name
    return beside if beside.is_dir() else checkpoint


def _equal_settings(settings: TrainSettings, prepared: Prepared) -> dict[str, Any]:
    """What must be equal on all machines. Paths may differ, and the number of devices."""
    given, evaluation = settings.given.items(), prepared.data.evaluation
    return {
        **{option(name): value for name, value in given if name not in OPTIONS or not OPTIONS[name].may_differ},
        "the tokens of --data": prepared.data.digest()[:17],
        "the tokens of --eval-data": None if evaluation is None else evaluation.digest()[:17],
        "the dtype of the weights": prepared.dtype,
        "the files of --adapter": None if settings.adapter is None else adapter_digest(settings.adapter),
        "the config of the model": hashlib.sha256(prepared.model_config.to_json_string().encode()).hexdigest()[:17],
    }


def starting_point(settings: TrainSettings) -> Path | None:
    """The checkpoint from which the run goes on; None to start anew. Refuses to start over existing checkpoints."""
    newest = latest(settings.out) if settings.out.is_dir() else None
    if settings.resume == "auto" or (is_restart() and not settings.resume):
        return newest
    if settings.resume is None:
        if newest is not None:
            raise ConfigError(
                f"--out {settings.out} has the checkpoints of an earlier run (the newest is {newest.name}). Add "
                "--resume to go on with that run, or give another --out to start anew."
            )
        return None
    if not settings.resume:
        if newest is None:
            raise ConfigError(
                f"--resume: there is no complete checkpoint in --out {settings.out}. Leave --resume out to start "
                "anew, or name the folder of a checkpoint: --resume DIR."
            )
        return newest
    folder = Path(settings.resume)
    if not folder.is_dir():
        raise ConfigError(f"--resume: there is no folder {folder}.")
    checkpoint = latest(folder) or folder
    verify(checkpoint, [_STATE_FILE])  # load() verifies all files
    return checkpoint


def _step_of(checkpoint: Path | None) -> int:
    """The step of a trainer's checkpoint by its name; 0 if there is none, or if it was renamed."""
    step = "" if checkpoint is None else checkpoint.resolve().name.removeprefix(_CHECKPOINT)
    return int(step) if step.isdecimal() else 0


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """Keep the output folder for this process inside the block. Raises ConfigError if another process has it.

    The system releases the lock when the process ends, however it ends. Forked processes, such as workers of a data
    loader, do not inherit it, so that they do not hold it when they live longer.
    """
    with open(out / _LOCK_FILE, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the two errors of POSIX for a lock of another process
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(
                f"--out {out} is in use by another run (process {owner}); wait until it ends, stop it, or give another "
                "--out."
            ) from None
        except OSError as error:
            logger.warning("--out %s cannot be locked (%s); do not start a second run there", out, error)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


# The model and its training.


def _load_model(settings: TrainSettings, prepared: Prepared) -> nn.Module:
    from transformers import set_seed

    set_seed(prepared.train_config.seed)  # of new weights
    if settings.init:
        return new_model(settings, prepared, torch.device("cpu"))
    form = checked_form(settings.roundpipe.get("frozen_weights"))
    is_packed = form is not None or prepared.quantised_as is not None
    if is_packed and settings.method.head is Head.TOKENS:  # a new head is made by from_pretrained()
        packed = new_model(settings, prepared, torch.device("meta"))
        fill(packed, local_folder(settings.model), form, settings.weights_folder)
        return packed
    given = settings.trainer.get("model_init_kwargs")
    further = json.loads(given) if isinstance(given, str) else given or {}
    if "dtype" in further or "torch_dtype" in further:
        raise ConfigError("--model-init-kwargs has a dtype; give the dtype of the weights with --dtype.")
    # Weights of other shapes are reported below, with their names.
    options = {**model_options(settings), **further, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        if settings.method.head is not Head.TOKENS:
            options["config"] = prepared.model_config
        loaded: Any = model_class(settings, prepared).from_pretrained(settings.model, dtype=prepared.dtype, **options)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        raise ConfigError(f"--model: cannot load the weights of {settings.model}: {one_line(error)}") from error
    model: nn.Module = loaded[0]
    _require_all_weights(settings, loaded[1])
    return model


def _load_all(settings: TrainSettings, prepared: Prepared) -> nn.Module:
    """The model, with the adapter that the run goes on with."""
    with phase(f"making the model from {settings.model}"):
        model = _load_model(settings, prepared)
    if settings.adapter is None:
        return model
    adapted: nn.Module
    adapted, _ = put_adapter(model, settings.adapter, "--model", is_trainable=True)
    return adapted


def _require_all_weights(settings: TrainSettings, report: Mapping[str, Any]) -> None:
    """Refuse a model that transformers has loaded in part only: the other parameters are random."""
    wrong = sorted(
        f"{name} {tuple(found)} instead of {tuple(needed)}" for name, found, needed in report["mismatched_keys"]
    )
    missing = sorted(report["missing_keys"])
    if settings.method.head is not Head.TOKENS:
        head = [name for name in missing if name.partition(".")[0] in _HEADS]
        if head:
            say(f"the head of the model, {', '.join(head)}, is new: {settings.model} has none of this kind")
        missing = [name for name in missing if name not in head]
    for fault, names in (("wrong shapes", wrong), ("no weights", missing)):
        if names:
            raise ConfigError(
                f"--model: {settings.model} has {fault} for {len(names)} parameters of its config, such as {names[0]}; "
                "use a complete model, or --init for random weights in all of it."
            )


def _train(settings: TrainSettings, prepared: Prepared, checkpoint: Path | None, launch: Launch) -> int:
    with plain_output():
        model = launch.together("loading the model", lambda: _load_all(settings, prepared))
    trainer = _new_trainer(settings, prepared, model)
    del model
    stop = StopSignals()
    trainer.run_view.about = about(settings)
    for callback in (_run_callback(settings, prepared, stop, launch), *early_stopping(settings)):
        trainer.add_callback(callback)
    try:
        with stop.caught(trainer):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if trainer.bad_row is not None:
                trainer.model.synchronize()
                raise trainer.bad_row
            trainer.model.synchronize()  # the last checkpoint is complete
            if stop.signum is None:
                _save_final_model(trainer, settings.out)
    except CheckpointError as error:
        if not stop.has_begun:
            raise  # the checkpoint to resume from is at fault
        raise RunFailure(one_line(error)) from error
    except ConfigError as error:  # of a row or a reward
        if stop.has_begun:
            error.add_note(how_to_resume(settings))
        raise
    except RuntimeError as error:
        if launch.size > 1 and "gloo" in str(error).lower():  # of a collective beside those of the model
            raise MachineError(None, f"another machine of the run is lost ({one_line(error)[:200]})") from error
        raise
    finally:
        trainer.run_view.close()  # before the last words of the run
        trainer.model.close()
    if stop.signum is not None:
        say(f"stopped by {signal.Signals(stop.signum).name} after step {trainer.state.global_step}")
        say(how_to_resume(settings))
        return 128 + stop.signum
    if not stop.has_begun:
        say(f"the run was complete at step {trainer.state.global_step} already; nothing was trained")
    elif (ended := how_it_stopped(settings, trainer.state)) is not None:
        say(ended)
    say(f"the final model is in {settings.out}")
    if (further := what_next(settings)) is not None:
        say(further)
    if (settings.out / "report.html").exists():
        say(f"the report is {settings.out / 'report.html'}")
    return 0


def _save_final_model(trainer: Any, out: Path) -> None:
    from safetensors import SafetensorError

    try:
        with plain_output():
            trainer.save_model(str(out))
    except (OSError, SafetensorError) as error:
        raise RunFailure(f"the final model could not be written into {out}: {one_line(error)}") from error


def _new_trainer(settings: TrainSettings, prepared: Prepared, model: nn.Module) -> Any:
    from roundpipe.integrations import RoundPipeOptions

    options = dict(settings.roundpipe, num_microbatch=prepared.num_microbatch)
    options |= {"samples": prepared.samples, "sample_tokens": settings.sample_tokens}
    if "optim_dtype" in options:
        options["optim_dtype"] = getattr(torch, options["optim_dtype"])
    # The tokenizer has the chat template already.
    config, data = copy.copy(prepared.train_config), prepared.data
    for name in ("chat_template_path", "model_init_kwargs"):
        if hasattr(config, name):
            setattr(config, name, None)
    of_method: dict[str, Any] = {}
    adapter = None if settings.lora is None else lora_config(settings)
    if settings.method.is_of_trl:
        of_method = {"peft_config": adapter}
    else:
        of_method = {"compute_metrics": accuracy}
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, adapter)
    if prepared.rewards:
        of_method["reward_funcs"] = list(prepared.rewards)
    try:
        # Rows are tokenized and cut already: bars of TRL that say so once more would frighten.
        with plain_output(for_terminals=True):
            trainer = _trainer_class(settings.method)(
                model=model,
                args=config,
                train_dataset=data.train_dataset(),
                eval_dataset=None if data.evaluation is None else data.evaluation.dataset,
                processing_class=prepared.processing_class,
                **of_method,
                roundpipe=RoundPipeOptions(**options),
            )
    except ValueError as error:  # of arguments that do not go together
        raise ConfigError(one_line(error)) from error
    trainer.fixes_microbatches = "num_microbatch" in settings.roundpipe
    return trainer


def _trainer_class(method: Method) -> Any:
    from roundpipe.integrations.iterable_data import SeekableRows

    base: Any = method.trainer_class()

    class SearchingTrainer(base):  # type: ignore[misc]
        """Doubles the number of microbatches when a step runs out of device memory, unless the user has set it."""

        advice_to_skip = "To leave such steps out, use --nonfinite skip."
        bad_row: ConfigError | None = None  # why the stream of rows has ended

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            """TRL's preparation. The rows of a stream are tokenized and cut already."""
            is_stream = isinstance(dataset, SeekableRows)
            return dataset if is_stream else super()._prepare_dataset(dataset, *args, **kwargs)

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            """Trainer's; a row that cannot be trained ends the run with a checkpoint of the steps before."""
            try:
                return super().get_batch_samples(*args, **kwargs)
            except ConfigError as error:
                if not self.state.global_step:
                    raise
                self.bad_row = error
                self.control.should_training_stop = True
                self.control.should_save = True
                return [], None

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            while True:
                randomness = torch.get_rng_state()  # calls draw their seeds from it
                try:
                    return super().training_step(*args, **kwargs)
                except torch.OutOfMemoryError as error:
                    self._split_further(error)
                    torch.set_rng_state(randomness)

        def _split_further(self, error: torch.OutOfMemoryError) -> None:
            used, most = self.roundpipe.num_microbatch, self.args.per_device_train_batch_size
            # With accumulation, the failed call may have been one of several whose gradients add up.
            # On several machines, the others have failed with this one.
            is_part = self.args.gradient_accumulation_steps > 1 or self.args.world_size > 1
            if self.fixes_microbatches or used >= most or is_part:
                raise DeviceError(
                    f"a step with {used} microbatches of {math.ceil(most / used)} sequences does not fit into device "
                    f"memory ({one_line(error)}). Raise --num-microbatch up to --batch {most}, lower --seq-len, or "
                    "use --attn-implementation sdpa."
                ) from error
            number = min(2 * used, most)
            logger.warning("a step does not fit into device memory; trying %d microbatches, not %d", number, used)
            self.model.zero_grad()  # gradients of the microbatches that did fit
            self.set_num_microbatch(number)

    return SearchingTrainer


# Signals and what is said at the end.


class RunFailure(Exception):
    """A run that had begun could not write its files. The message names file and reason."""


class StopSignals:
    """SIGINT and SIGTERM end the run after the current step. A second SIGINT raises KeyboardInterrupt at once.

    has_begun: whether the first step has begun.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.has_begun = False

    @contextlib.contextmanager
    def caught(self, trainer: Any) -> Iterator[None]:
        """Handle the signals inside the block, if this is the main thread."""

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.signum is not None and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self.signum = signum
            trainer.model.request_stop()
            if not trainer.run_view.show_note(_STOPPING):
                os.write(2, f"\n{_STOPPING}\n".encode())  # a handler may interrupt a write to sys.stderr

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _run_callback(settings: TrainSettings, prepared: Prepared, stop: StopSignals, launch: Launch) -> Any:
    from transformers import TrainerCallback

    class RunCallback(TrainerCallback):
        """Keeps the options of the run. Saves and ends the training after the step in which a signal has come.

        A signal on one machine ends the training on all, after the same step.
        """

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if launch.is_first:
                _write_settings(settings, prepared)  # not before: the checkpoint, if any, fits to them

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            stop.has_begun = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            signals = [signum for signum in launch.gathered(stop.signum) if signum is not None]
            if signals:
                stop.signum = signals[0]
                control.should_save = control.should_training_stop = True

    return RunCallback()


def how_to_resume(settings: TrainSettings) -> str:
    """The line that names the newest checkpoint and the command that goes on from it."""
    newest = latest(settings.out) if settings.out.is_dir() else None
    if newest is None:
        return f"{settings.out} has no checkpoint to resume from; the same command starts the run from its beginning"
    if not (settings.out / SETTINGS_FILE).exists():
        return f"the newest checkpoint is {newest}; to resume, repeat the command with --resume"
    command = shlex.join(["roundpipe", "train", "--config", str(settings.out / SETTINGS_FILE), "--resume"])
    return f"the newest checkpoint is {newest}; to resume: {command}"


def _those(on_resume: OnResume) -> list[str]:
    """The options with this rule for resumed runs."""
    return [each.name for each in OPTIONS.values() if each.on_resume is on_resume]


def _kept_settings(settings: TrainSettings) -> dict[str, Any]:
    """The options of a run by the names of a config file."""
    kept = {name: value for name, value in settings.given.items() if name not in _those(OnResume.NOT_KEPT)}
    for name in ("model", "adapter", "data", "eval_data", "samples"):
        paths = [kept[name]] if isinstance(kept.get(name), str) else kept.get(name, ())
        if paths:  # absolute: the command works in every folder
            whole = [_with_whole_path(path) for path in paths]
            kept[name] = whole if len(whole) > 1 else whole[0]
    if settings.rewards:
        kept["reward"] = [with_whole_path(each) for each in settings.rewards]
    kept["output_dir"] = str(settings.out.absolute())
    for name in ("state_folder", "weights_folder"):
        if name in kept:
            kept[name] = str(Path(kept[name]).absolute())
    return {option(name).removeprefix("--"): value for name, value in sorted(kept.items())}


def _with_whole_path(given: str) -> str:
    """The value of an option with an absolute path. Names of the hub stay as they are."""
    path, weight = split_weight(given)
    whole = str(Path(path).absolute()) if Path(path).exists() else path
    return whole if weight is None else f"{whole}={weight!r}"


def _write_settings(settings: TrainSettings, prepared: Prepared) -> None:
    import yaml  # type: ignore[import-untyped]

    replace_file(settings.out / _DATA_FILE, prepared.data.digest() + "\n")
    replace_file(settings.out / SETTINGS_FILE, yaml.safe_dump(_kept_settings(settings), sort_keys=False))


def _warn_of_changes(settings: TrainSettings, prepared: Prepared) -> None:
    """Log a warning if a resumed run has other data or options than before."""
    _warn_of_other_data(settings, prepared)
    file = settings.out / SETTINGS_FILE
    if not file.exists():
        return
    try:
        before, now = read_yaml(file), _kept_settings(settings)
    except ValueError as error:
        logger.warning("%s; changed options of the resumed run are not noticed", error)
        return
    harmless = {option(name).removeprefix("--") for name in _those(OnResume.ACCEPT)}
    fixed = {option(name).removeprefix("--") for name in _those(OnResume.NO_EFFECT)}
    names = sorted((before.keys() | now.keys()) - harmless)
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        logger.warning(
            "the resumed run has other options than before (%s); its losses may differ",
            "; ".join(f"{name}: {before.get(name)} -> {now.get(name)}" for name in changed),
        )
    without_effect = [name for name in changed if name in fixed]
    if without_effect:
        logger.warning(
            "--%s has no effect: the optimizer and its schedule go on with the values of the checkpoint",
            ", --".join(without_effect),
        )


def _warn_of_other_data(settings: TrainSettings, prepared: Prepared) -> None:
    file = settings.out / _DATA_FILE
    if not file.exists():
        return
    before = file.read_text(encoding="utf-8", errors="replace").strip()
    if not before.startswith("rows:"):
        logger.warning(
            "cannot tell whether --data is the same as before: %s is damaged, or of an earlier version of roundpipe, "
            "whose checksum does not show where rows begin",
            file,
        )
    elif before != prepared.data.digest():
        logger.warning("--data has other rows than before, so the losses of the resumed run differ")


@contextlib.contextmanager
def _wait_limit(seconds: float | None) -> Iterator[None]:
    """Set the limit of waits inside the block."""
    if seconds is None:
        yield
        return
    before = os.environ.get(WAIT_LIMIT_VARIABLE)
    os.environ[WAIT_LIMIT_VARIABLE] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[WAIT_LIMIT_VARIABLE]
        else:
            os.environ[WAIT_LIMIT_VARIABLE] = before
