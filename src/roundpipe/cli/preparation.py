"""What a run needs before its model is loaded: tokenizer, tokens, devices, estimates of memory and disk; the dry run.

Loads no weights and writes nothing. Knows nothing of the training itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.cli.arguments import TrainSettings, merge_command, option
from roundpipe.cli.data import DataStatistics, TokenRows, check_tokens, tokenize
from roundpipe.cli.launch import is_first
from roundpipe.cli.rows import read_rows
from roundpipe.devices import DeviceSpec, open_devices, parse_devices
from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.report.metrics import METRICS_FILE, RECORD_FILE
from roundpipe.split.discovery import block_paths
from roundpipe.store.adopt import SECOND_WEIGHTS, PinMode, training_memory
from roundpipe.store.host_memory import available_host_bytes, memory_table, require_host_memory

_WEIGHT_ENDINGS = (".safetensors", ".bin")
_ADAPTER_FILE = "adapter_config.json"
_OF_CHECKPOINTS = ("checkpoint-", "latest")  # how entries of an output folder begin that a run replaces and removes
_TOKENIZER_NAMES = ("token", "vocab", "spiece", "sentencepiece", "spm", "merges", "qwen.tiktoken", "tekken")


def say(text: str = "") -> None:
    """Write a line to stdout, unless its reader has gone: that must not fail a run. Only rank 0 of a run writes."""
    if not is_first():
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # also for what the interpreter flushes at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All of a run that is known before the model is loaded."""

    model_config: Any
    tokenizer: Any
    sft_config: Any
    train: TokenRows
    train_statistics: DataStatistics
    evaluation: TokenRows | None
    eval_statistics: DataStatistics | None
    specs: tuple[DeviceSpec, ...]
    dtype: torch.dtype
    num_microbatch: int
    total_steps: int
    num_machines: int


def prepare(settings: TrainSettings, num_machines: int) -> Prepared:
    """Check options, tokenizer and data, and tokenize the data. Loads no weights."""
    check_out(settings)
    read = {"train": [read_rows(path, "--data", settings.text_rows) for path in settings.data]}
    if settings.eval_data:
        read["eval"] = [read_rows(path, "--eval-data", settings.text_rows) for path in settings.eval_data]
    model_config, tokenizer = _load_config_and_tokenizer(settings)
    sft_config = _sft_config(settings)
    tokens, counts = {}, {}
    text_config = model_config.get_text_config()
    assistant_only = settings.sft.get("assistant_only_loss")
    for name, parts in read.items():
        with plain_output():
            tokens[name] = TokenRows.joined(
                [tokenize(rows, tokenizer, sft_config, assistant_only=assistant_only) for rows in parts]
            )
        counts[name] = check_tokens(
            tokens[name],
            "--data" if name == "train" else "--eval-data",
            seq_len=sft_config.max_length,
            truncates=settings.truncate,
            keeps_end=sft_config.truncation_mode == "keep_end",
            packs=sft_config.packing,
            vocabulary=text_config.vocab_size,
            most_positions=getattr(text_config, "max_position_embeddings", None),
        )
    specs = parse_devices(settings.roundpipe.get("devices"))
    batch = sft_config.per_device_train_batch_size
    total_steps = _total_steps(sft_config, counts["train"].rows, num_machines)
    _check_optimizer(sft_config, total_steps)
    return Prepared(
        model_config=model_config,
        tokenizer=tokenizer,
        sft_config=sft_config,
        train=tokens["train"],
        train_statistics=counts["train"],
        evaluation=tokens.get("eval"),
        eval_statistics=counts.get("eval"),
        specs=specs,
        dtype=getattr(torch, settings.dtype or ("float32" if specs[0].kind == "cpu" else "bfloat16")),
        num_microbatch=min(settings.roundpipe.get("num_microbatch", len(specs) + 1), batch),
        total_steps=total_steps,
        num_machines=num_machines,
    )


def check_out(settings: TrainSettings) -> None:
    """Refuse an output folder that cannot be written, or has files of the model or the data. Creates nothing."""
    _check_writable(settings.out)
    _check_inputs_stay(settings)


def _check_writable(out: Path) -> None:
    existing = next(each for each in (out, *out.absolute().parents) if each.exists())
    if out.is_symlink() and existing != out:
        raise ConfigError(f"--out {out} is a link to {os.readlink(out)}, which does not exist; make that folder.")
    if not existing.is_dir():
        raise ConfigError(f"--out {out}: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: no permission to write into {existing}.")


def _check_inputs_stay(settings: TrainSettings) -> None:
    """Refuse an output folder in which the run would overwrite or remove files of its model or data."""
    out, model = settings.out, Path(settings.model)
    inside = _inside(model, out)
    shared = _files(model) & _files(out)
    if _is_same(model, out) or shared or (inside is not None and inside.startswith(_OF_CHECKPOINTS)):
        raise ConfigError(
            f"--out {out} has the files of --model {settings.model}, which the run would overwrite or remove; give "
            "another --out."
        )
    for name, paths in (("--data", settings.data), ("--eval-data", settings.eval_data)):
        for path in paths:
            if _is_same(path, out) or _inside(path, out) in (METRICS_FILE, RECORD_FILE):
                raise ConfigError(
                    f"--out {out} is the place of {name} {path}, to which the run would write; give another --out."
                )


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name the same file or folder, also through links. Neither has to exist."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _inside(path: Path, folder: Path) -> str | None:
    """The name of the entry of `folder` that `path` is, or is inside of; None if it is elsewhere."""
    whole, parent = path.resolve(), folder.resolve()
    return whole.relative_to(parent).parts[0] if parent in whole.parents else None


def _files(folder: Path) -> set[tuple[int, int]]:
    """Device and number of each file in a folder; links count as the files that they lead to."""
    stats = [entry.stat() for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    return {(stat.st_dev, stat.st_ino) for stat in stats}


def _load_config_and_tokenizer(settings: TrainSettings) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(settings.model)
    looks_like_path = folder.is_absolute() or settings.model.startswith(".") or settings.model.count("/") > 1
    if not folder.exists() and looks_like_path:
        raise ConfigError(f"--model: there is no folder {settings.model}.")
    if folder.is_dir():
        _check_model_folder(folder, needs_weights=not settings.init)
    options = {"trust_remote_code": bool(settings.sft.get("trust_remote_code"))}
    what = "config"
    try:
        config = AutoConfig.from_pretrained(settings.model, **options)
        what = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(settings.model, **options)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        nowhere = "" if folder.exists() else "there is no such folder, and from the hub: "
        raise ConfigError(f"--model: cannot load the {what} of {settings.model}: {nowhere}{one_line(error)}") from error
    _set_tokens(tokenizer, settings)
    return config, tokenizer


def _check_model_folder(folder: Path, *, needs_weights: bool) -> None:
    """Refuse a folder without tokenizer or weights, or with damaged safetensors. Reads only the headers of these."""
    from safetensors import SafetensorError, safe_open

    names = [each.name for each in folder.iterdir()]
    if _ADAPTER_FILE in names:
        base = _base_of_adapter(folder) or "its model"
        raise ConfigError(
            f"--model: {folder} is an adapter of PEFT for {base}, not a model. To train a new adapter, give --model "
            f"{base} and --lora R. To train this one further is not supported yet; merge it into its model, and give "
            f"the result as --model: {merge_command(str(folder), 'MERGED')}"
        )
    if needs_weights and not any(name.endswith(_WEIGHT_ENDINGS) for name in names):
        raise ConfigError(f"--model: {folder} has no weights (*.safetensors); for random weights add --init.")
    if not any(name.startswith(_TOKENIZER_NAMES) for name in names):
        raise ConfigError(
            f"--model: {folder} has no tokenizer; put the model's tokenizer there with tokenizer.save_pretrained()."
        )
    for file in folder.glob("*.safetensors") if needs_weights else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"--model: {file} is damaged: {one_line(error)}; copy or download it again.") from error


def _base_of_adapter(folder: Path) -> str | None:
    try:
        base = json.loads((folder / _ADAPTER_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return base if isinstance(base, str) else None


def _set_tokens(tokenizer: Any, settings: TrainSettings) -> None:
    """Apply --chat-template-path and --eos-token to the tokenizer."""
    template = settings.sft.get("chat_template_path")
    if template is not None:
        if not os.path.isfile(template):
            raise ConfigError(f"--chat-template-path must be a file with a Jinja template, got {template}.")
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    eos = settings.sft.get("eos_token")
    if eos is not None:
        if eos not in tokenizer.get_vocab():
            raise ConfigError(f"--eos-token: the tokenizer has no token {eos!r}.")
        tokenizer.eos_token = eos
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has neither a padding nor an end-of-sequence token; give --eos-token.")


def _sft_config(settings: TrainSettings) -> Any:
    """The trl.SFTConfig of a run."""
    from trl.trainer.sft_config import SFTConfig

    for name in SFTConfig._VALID_DICT_FIELDS:
        value = settings.sft.get(name)
        if isinstance(value, str) and not os.path.isfile(value):  # Path.is_file() raises for long texts
            try:
                is_object = isinstance(json.loads(value), dict)
            except ValueError:
                is_object = False
            if not is_object:
                raise ConfigError(f"{option(name)} must be a JSON object such as '{{\"a\": 1}}', got {value!r}.")
    fields = {**settings.sft, "assistant_only_loss": False}
    if "activation_checkpointing" in SFTConfig.__dataclass_fields__:  # transformers 5.23 warns about the old name alone
        fields.setdefault("activation_checkpointing", fields["gradient_checkpointing"])
    try:
        config = SFTConfig(**fields)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(one_line(error)) from error
    _check_reporting(config)
    return config


def _check_optimizer(config: Any, total_steps: int) -> None:
    """Make the optimizer and the schedule of the run for one parameter, to find options that they refuse."""
    from transformers import get_scheduler

    from roundpipe.integrations import RoundPipeTrainer

    what = f"--optim {getattr(config.optim, 'value', config.optim)}"
    try:
        optimizer_class, options = RoundPipeTrainer.get_optimizer_cls_and_kwargs(config)
        optimizer = optimizer_class([nn.Parameter(torch.zeros(1))], **options)
        what = f"--schedule {config.lr_scheduler_type.value} with {total_steps} steps"
        get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            config.get_warmup_steps(total_steps),
            total_steps,
            config.lr_scheduler_kwargs,
        )
    except (ValueError, TypeError, ImportError, ArithmeticError) as error:
        raise ConfigError(f"{what} cannot be used: {one_line(error)}") from error


def _check_reporting(sft_config: Any) -> None:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    available = get_available_reporting_integrations()
    for name in sft_config.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(
                f"--report-to {name} is unknown; give one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
            )
        if name not in available:
            raise ConfigError(
                f"--report-to {name}: its package is not installed here. Install it, leave the option out, or use one "
                f"that is installed: {', '.join(available) or 'there is none'}."
            )


def _total_steps(sft_config: Any, rows: int, num_machines: int) -> int:
    """Optimizer steps of the run, as transformers' Trainer counts them."""
    if sft_config.max_steps > 0:
        return int(sft_config.max_steps)
    batch: int = sft_config.per_device_train_batch_size * num_machines
    accumulated: int = sft_config.gradient_accumulation_steps
    batches = rows // batch if sft_config.dataloader_drop_last else math.ceil(rows / batch)
    if not batches:
        of = "" if num_machines == 1 else f" ({batch // num_machines} on each of {num_machines} machines)"
        raise ConfigError(f"--data has {rows} rows, less than one batch of {batch}{of}; lower --batch.")
    epochs: float = sft_config.num_train_epochs
    return math.ceil(epochs * max(math.ceil(batches / accumulated), 1))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """No progress bars of datasets and transformers inside the block, unless they go to a terminal.

    Bars that the user has disabled stay disabled afterwards.
    """
    from datasets.utils import (  # type: ignore[import-untyped]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty():
        yield
        return
    of_datasets, of_transformers = not are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if of_datasets:
            enable_progress_bars()
        if of_transformers:
            transformers_logging.enable_progress_bar()


# Memory and disk.


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a run needs, by purpose: in host memory, at least on each device, on the disk of the output folder."""

    host: Mapping[str, int]
    device: Mapping[str, int]
    disk: Mapping[str, int]
    parameters: int
    trainable: int

    def require(self, settings: TrainSettings) -> None:
        """Raise if host memory or disk do not suffice."""
        try:
            require_host_memory(
                self.host,
                "this run",
                "Use a smaller model, --lora R, --optim-dtype bfloat16, or a machine with more memory.",
            )
        except HostMemoryError as error:
            raise HostMemoryError(f"too little host memory: {error}") from None
        needed, free = sum(self.disk.values()), free_disk_bytes(settings.out)
        if needed > free:
            table = memory_table({**self.disk, "needed in all": needed, "free": free, "missing": needed - free})
            raise ConfigError(
                f"too little disk space for --out {settings.out}:\n{table}\nFree some space, give another --out, keep "
                "fewer checkpoints (--keep), or train with --lora R."
            )


def memory_needs(settings: TrainSettings, prepared: Prepared) -> Needs:
    """Estimate memory and disk from a model without weights (on the meta device)."""
    model = new_model(settings, prepared, torch.device("meta"))
    blocks = [model.get_submodule(path) for path in block_paths(model)]
    if settings.lora is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, lora_config(settings), autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"--lora: peft cannot make the adapter: {one_line(error)}") from error
    optim_dtype = getattr(torch, settings.roundpipe.get("optim_dtype", "float32"))
    # REGISTER: what moving the weights needs depends on their memory, and this model has none. Wrapping counts it.
    host = training_memory([model], optim_dtype, PinMode.REGISTER, num_machines=prepared.num_machines)
    second = host.pop(SECOND_WEIGHTS)
    if settings.roundpipe["is_async"]:
        host[SECOND_WEIGHTS] = second
    trainable = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.nbytes for p in trainable)
    of_machine = host["optimizer copies"] + host["optimizer state (Adam)"]
    checkpoint = trained_bytes + of_machine * prepared.num_machines
    count = _checkpoints_to_come(settings, prepared)
    return Needs(
        host={name: size for name, size in host.items() if size},
        device=_device_needs(model, blocks, prepared),
        disk={f"checkpoints ({count} of {checkpoint / 1e9:.3f} GB)": count * checkpoint, "final model": trained_bytes},
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trainable),
    )


def _checkpoints_to_come(settings: TrainSettings, prepared: Prepared) -> int:
    """How many more checkpoints will be on the disk at a time than now."""
    config = prepared.sft_config
    every = config.save_steps if config.save_steps >= 1 else config.save_steps * prepared.total_steps
    made = math.ceil(prepared.total_steps / float(every))
    if config.save_total_limit is None:
        return made
    present = len(list(settings.out.glob("checkpoint-*"))) if settings.out.is_dir() else 0
    # A new checkpoint is complete before the oldest one is removed.
    return max(1, min(made, int(config.save_total_limit) + 1) - present)


def _device_needs(model: nn.Module, blocks: list[nn.Module], prepared: Prepared) -> dict[str, int]:
    """What each device holds at least: the largest layer twice, its gradient, one microbatch."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    sizes += [p.nbytes for p in model.parameters() if id(p) not in inside]
    text_config, itemsize = prepared.model_config.get_text_config(), prepared.dtype.itemsize
    rows = math.ceil(prepared.sft_config.per_device_train_batch_size / prepared.num_microbatch)
    tokens = rows * prepared.train_statistics.longest
    return {
        "two of the largest layers": 2 * max(sizes),
        "gradient of the largest layer": max(sizes),
        "inputs of the layers": len(blocks) * tokens * text_config.hidden_size * itemsize,
        "logits": tokens * text_config.vocab_size * itemsize,
    }


def free_disk_bytes(folder: Path) -> int:
    """Free bytes on the disk that has the folder, or will have it."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free


def report_dry_run(settings: TrainSettings, prepared: Prepared, needs: Needs, checkpoint: Path | None) -> None:
    config = prepared.sft_config
    say("settings")
    rows: dict[str, Any] = {
        "model": settings.model,
        "weights": "random (--init)" if settings.init else f"{prepared.dtype}".removeprefix("torch."),
        "parameters": f"{needs.parameters:,}, of which {needs.trainable:,} are trained",
        "starts from": checkpoint or "the beginning",
        "sequence length": config.max_length,
        "machines": prepared.num_machines,
        "sequences per step": config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * prepared.num_machines,
        "steps": prepared.total_steps,
        "learning rate": f"{config.learning_rate:g}, {settings.sft['lr_scheduler_type']}",
        "steps are": "stale" if settings.roundpipe["is_async"] else "exact",
        "devices": ", ".join(f"{spec.kind}:{spec.index}" if spec.kind == "cuda" else "cpu" for spec in prepared.specs),
        "microbatches": prepared.num_microbatch,
        "seed": config.seed,
        "output folder": settings.out,
    }
    for name, value in rows.items():
        say(f"  {name:<20} {value}")
    for title, counts in (("data", prepared.train_statistics), ("evaluation data", prepared.eval_statistics)):
        if counts is not None:
            say(title)
            for field in dataclasses.fields(counts):
                say(f"  {field.name.replace('_', ' '):<20} {getattr(counts, field.name):,}")
    available = available_host_bytes()
    say("host memory")
    say(memory_table({**needs.host, "needed in all": sum(needs.host.values()), "available": available or 0}))
    say("memory of each device, at least")
    say(memory_table({**needs.device, "needed in all": sum(needs.device.values()), **_device_limits(prepared.specs)}))
    say("disk")
    say(memory_table({**needs.disk, "needed in all": sum(needs.disk.values()), "free": free_disk_bytes(settings.out)}))


def _device_limits(specs: tuple[DeviceSpec, ...]) -> dict[str, int]:
    """Usable memory by device. Virtual devices use host memory and have no limit."""
    limits = {}
    for device in open_devices(specs):
        limit = device.memory_limit_bytes()
        if limit is not None:
            limits[f"available on {device.name}"] = limit
        device.close()
    return limits


# Models without trained weights.


def lora_config(settings: TrainSettings) -> Any:
    from peft import LoraConfig

    lora = settings.lora
    assert lora is not None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def new_model(settings: TrainSettings, prepared: Prepared, device: torch.device) -> nn.Module:
    """A model of the config, with random weights or, on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    try:
        with device:
            model: nn.Module = AutoModelForCausalLM.from_config(
                prepared.model_config, dtype=prepared.dtype, **model_options(settings)
            )
    except Exception as error:  # of the model's code, for a configuration that does not fit together
        raise ConfigError(f"--model: cannot build {settings.model}: {one_line(error)}") from error
    return model


def model_options(settings: TrainSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": bool(settings.sft.get("trust_remote_code"))}
    if settings.attn_implementation is not None:
        options["attn_implementation"] = settings.attn_implementation
    return options
