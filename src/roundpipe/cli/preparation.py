"""What a run needs before its model is loaded: tokenizer, tokens, devices, estimates of memory and disk; the dry run.

Loads no weights and writes nothing. Knows nothing of the training itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.cli.adapters import ADAPTER_FILE, on_paper, read_adapter_config
from roundpipe.cli.arguments import TrainSettings, merge_command
from roundpipe.cli.console import one_line, say, say_fields
from roundpipe.cli.disks import (
    Disk,
    check_scratch_folders,
    check_writable,
    disks_of,
    saves_memory,
    state_folder_of,
    weights_to_write,
)
from roundpipe.cli.methods import Head
from roundpipe.cli.options import option
from roundpipe.cli.rewards import Reward, load_rewards
from roundpipe.cli.samples import read_prompts
from roundpipe.cli.sources import require_source
from roundpipe.cli.training_data import DataReader, TrainingData
from roundpipe.cli.watching import check_reporting
from roundpipe.devices import DeviceSpec, open_devices, parse_devices
from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.host_facts import available_host_bytes
from roundpipe.integrations.optimizers import chosen_moments, class_and_arguments
from roundpipe.loading import local_folder, quantised_as, quantised_parameters
from roundpipe.packed import checked_form, pack_frozen
from roundpipe.packed.choice import pack_on_paper
from roundpipe.report.metrics import METRICS_FILE, RECORD_FILE
from roundpipe.report.samples import SAMPLES_FILE
from roundpipe.split.discovery import block_paths
from roundpipe.store.host_memory import memory_table, require_host_memory
from roundpipe.store.training_memory import SECOND_WEIGHTS, PinMode, assumed_optimizer, assumed_state, training_memory

_WEIGHT_ENDINGS = (".safetensors", ".bin")
_OF_CHECKPOINTS = ("checkpoint-", "latest")  # how entries of an output folder begin that a run replaces and removes
_TOKENIZER_NAMES = ("token", "vocab", "spiece", "sentencepiece", "spm", "merges", "qwen.tiktoken", "tekken")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All of a run that is known before the model is loaded."""

    model_config: Any
    quantised_as: str | None
    tokenizer: Any
    processing_class: Any
    train_config: Any
    data: TrainingData
    specs: tuple[DeviceSpec, ...]
    dtype: torch.dtype
    num_microbatch: int
    total_steps: int
    num_machines: int
    rewards: Sequence[Reward]
    samples: Sequence[Any]


def data_reader(settings: TrainSettings) -> DataReader:
    """Check the options, and load the tokenizer and the model's config for the rows of a run."""
    for name, paths in (("--data", settings.data), ("--eval-data", settings.eval_data)):
        # Before TRL and transformers are imported, which takes seconds.
        for path in paths:
            require_source(path, name)
    model_config, tokenizer = _load_config_and_tokenizer(settings)
    _check_quantised(settings, model_config)
    train_config = _train_config(settings)
    return DataReader(settings, model_config, tokenizer, train_config)


def _check_quantised(settings: TrainSettings, model_config: Any) -> None:
    """Refuse what does not go with weights that come quantised."""
    kind = None if settings.init else quantised_as(model_config, settings.model)
    if kind is None:
        return
    what = f"--model: {settings.model} has weights that are quantised as {kind}"
    if settings.lora is None and settings.adapter is None:
        raise ConfigError(f"{what}, which do not train; add --lora R or --adapter DIR, or give the plain model.")
    if settings.method.head is not Head.TOKENS:
        raise ConfigError(
            f"{what}, which --method {settings.method.name} cannot give a new head; give the plain model."
        )
    if settings.trainer.get("model_init_kwargs"):
        raise ConfigError(
            f"{what} and read tensor by tensor, but --model-init-kwargs are for from_pretrained(); leave them out."
        )


def prepare(settings: TrainSettings, num_machines: int) -> Prepared:
    """Check options, tokenizer and data, and tokenize the data. Loads no weights."""
    check_out(settings)
    check_scratch_folders(settings)
    if settings.streaming and num_machines > 1:
        raise ConfigError(f"--streaming trains on one machine, and {num_machines} were started; leave it out.")
    specs = parse_devices(settings.roundpipe.get("devices"))
    dtype = _dtype_of_weights(settings, specs)
    rewards = load_rewards(settings.rewards)
    reader = data_reader(settings)
    data, train_config = reader.read(), reader.config
    for reward in rewards:
        reward.check_keys(data.train.dataset.column_names)
    batch = train_config.per_device_train_batch_size
    total_steps = _total_steps(train_config, data.train_statistics.rows, num_machines)
    _check_optimizer(train_config, settings, total_steps)
    return Prepared(
        model_config=reader.model_config,
        quantised_as=None if settings.init else quantised_as(reader.model_config, settings.model),
        tokenizer=reader.tokenizer,
        processing_class=reader.processor if data.has_images else reader.tokenizer,
        train_config=train_config,
        data=data,
        specs=specs,
        dtype=dtype,
        num_microbatch=min(settings.roundpipe.get("num_microbatch", len(specs) + 1), batch),
        total_steps=total_steps,
        num_machines=num_machines,
        rewards=rewards,
        samples=_samples(settings, num_machines, are_chats=data.train.are_chats),
    )


def _dtype_of_weights(settings: TrainSettings, specs: Sequence[DeviceSpec]) -> torch.dtype:
    name = settings.dtype or ("float32" if specs[0].kind == "cpu" else "bfloat16")
    bits = settings.roundpipe.get("master_bits", 32)
    if bits != 32 and name != "bfloat16":
        raise ConfigError(f"--master-bits {bits} needs --dtype bfloat16, and the weights are {name}.")
    if bits != 32 and (settings.lora is not None or settings.adapter is not None):
        raise ConfigError(f"--master-bits {bits} is for bfloat16 weights, and adapters train in float32; leave it out.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _samples(settings: TrainSettings, num_machines: int, *, are_chats: bool) -> Sequence[Any]:
    if settings.samples is None:
        return ()
    if num_machines > 1:
        raise ConfigError(f"--samples works on one machine alone, this run has {num_machines}; leave it out.")
    return read_prompts(settings.samples, are_chats=are_chats)


def check_out(settings: TrainSettings) -> None:
    """Refuse an output folder that cannot be written, or has files of the model or the data. Creates nothing."""
    check_writable("--out", settings.out)
    _check_inputs_stay(settings)


def _check_inputs_stay(settings: TrainSettings) -> None:
    """Refuse an output folder in which the run would overwrite or remove files of its model or data."""
    out = settings.out
    sources = [("--model", Path(settings.model))]
    sources += [] if settings.adapter is None else [("--adapter", settings.adapter)]
    for name, folder in sources:
        inside = _inside(folder, out)
        shared = _files(folder) & _files(out)
        if _is_same(folder, out) or shared or (inside is not None and inside.startswith(_OF_CHECKPOINTS)):
            raise ConfigError(
                f"--out {out} has the files of {name} {folder}, which the run would overwrite or remove; give another "
                "--out."
            )
    samples = [] if settings.samples is None else [settings.samples]
    for name, paths in (("--data", settings.data), ("--eval-data", settings.eval_data), ("--samples", samples)):
        for path in paths:
            if _is_same(path, out) or _inside(path, out) in (METRICS_FILE, RECORD_FILE, SAMPLES_FILE):
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

    if settings.adapter is not None:
        read_adapter_config(settings.adapter)
    folder = Path(settings.model)
    looks_like_path = folder.is_absolute() or settings.model.startswith(".") or settings.model.count("/") > 1
    if not folder.exists() and looks_like_path:
        raise ConfigError(f"--model: there is no folder {settings.model}.")
    if folder.is_dir():
        _check_model_folder(folder, needs_weights=not settings.init)
    options = {"trust_remote_code": bool(settings.trainer.get("trust_remote_code"))}
    what = "config"
    try:
        config = AutoConfig.from_pretrained(settings.model, **options)
        what = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_source(settings), **options)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        nowhere = "" if folder.exists() else "there is no such folder, and from the hub: "
        raise ConfigError(f"--model: cannot load the {what} of {settings.model}: {nowhere}{one_line(error)}") from error
    _set_tokens(tokenizer, settings)
    if settings.method.head is not Head.TOKENS:
        # The score is that of the last token which is no padding.
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if settings.method.head is Head.SCORE:
        config.num_labels = 1
    return config, tokenizer


def _tokenizer_source(settings: TrainSettings) -> str:
    """Where the tokenizer is: beside the adapter that is trained further, if one was saved there, else with the model.

    It has the chat template with which the adapter was trained.
    """
    adapter = settings.adapter
    has_own = adapter is not None and any(file.name.startswith(_TOKENIZER_NAMES) for file in adapter.iterdir())
    return str(adapter) if has_own else settings.model


def _check_model_folder(folder: Path, *, needs_weights: bool) -> None:
    """Refuse a folder without tokenizer or weights, or with damaged safetensors. Reads only the headers of these."""
    from safetensors import SafetensorError, safe_open

    names = [each.name for each in folder.iterdir()]
    if ADAPTER_FILE in names:
        base = read_adapter_config(folder).get("base_model_name_or_path") or "its model"
        raise ConfigError(
            f"--model: {folder} is an adapter of PEFT for {base}, not a model. To train a new adapter, give --model "
            f"{base} and --lora R. To train this one further, give --adapter {folder}. To train a model with it, merge "
            f"both, and give the result as --model: {merge_command(str(folder), 'MERGED')}"
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


def _set_tokens(tokenizer: Any, settings: TrainSettings) -> None:
    """Apply --chat-template-path and --eos-token to the tokenizer."""
    template = settings.trainer.get("chat_template_path")
    if template is not None:
        if not os.path.isfile(template):
            raise ConfigError(f"--chat-template-path must be a file with a Jinja template, got {template}.")
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    eos = settings.trainer.get("eos_token")
    if eos is not None:
        if eos not in tokenizer.get_vocab():
            raise ConfigError(f"--eos-token: the tokenizer has no token {eos!r}.")
        tokenizer.eos_token = eos
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has neither a padding nor an end-of-sequence token; give --eos-token.")


def _train_config(settings: TrainSettings) -> Any:
    """The arguments of the trainer of a run."""
    config_class = settings.method.config_class()
    for name in config_class._VALID_DICT_FIELDS:
        value = settings.trainer.get(name)
        if isinstance(value, str) and not os.path.isfile(value):  # Path.is_file() raises for long texts
            try:
                is_object = isinstance(json.loads(value), dict)
            except ValueError:
                is_object = False
            if not is_object:
                raise ConfigError(f"{option(name)} must be a JSON object such as '{{\"a\": 1}}', got {value!r}.")
    names = config_class.__dataclass_fields__
    fields = {name: value for name, value in settings.trainer.items() if name in names}
    if "assistant_only_loss" in names:
        fields["assistant_only_loss"] = False  # the rows have labels
    if settings.method.head is Head.CLASSES:
        fields["prediction_loss_only"] = False  # evaluations have the accuracy
    if "remove_unused_columns" in names and settings.method.config[0].startswith("trl.experimental"):
        fields.setdefault("remove_unused_columns", False)  # their collators need the columns, and warn otherwise
    if "activation_checkpointing" in names:  # transformers 5.23 warns about the old name alone
        fields.setdefault("activation_checkpointing", fields["gradient_checkpointing"])
    try:
        config = config_class(**fields)
    except (ValueError, TypeError, ImportError) as error:
        is_batch = settings.method.is_rewarded and "must be divisible by" in str(error)
        advice = " Give a --batch that is a multiple of --num-generations: it counts answers." if is_batch else ""
        raise ConfigError(one_line(error) + advice) from error
    check_reporting(config.report_to)
    return config


def _check_optimizer(config: Any, settings: TrainSettings, total_steps: int) -> None:
    """Make the optimizer and the schedule of the run for one parameter, to find options that they refuse."""
    from transformers import Trainer, get_scheduler

    what = f"--optim {getattr(config.optim, 'value', config.optim)}"
    try:
        optimizer_class, options = class_and_arguments(
            config,
            settings.roundpipe.get("moments"),
            Trainer.get_optimizer_cls_and_kwargs,
            state_folder=state_folder_of(settings),
            on_devices=settings.roundpipe.get("on_devices"),
        )
        options.pop("state_folder", None)  # an optimizer makes its folder, and a dry run makes nothing
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


def _total_steps(train_config: Any, rows: int, num_machines: int) -> int:
    """Optimizer steps of the run, as transformers' Trainer counts them."""
    if train_config.max_steps > 0:
        return int(train_config.max_steps)
    batch: int = train_config.per_device_train_batch_size * num_machines
    accumulated: int = train_config.gradient_accumulation_steps
    batches = rows // batch if train_config.dataloader_drop_last else math.ceil(rows / batch)
    if hasattr(train_config, "num_generations"):  # a batch has several answers to each prompt
        batch = train_config.generation_batch_size // train_config.num_generations
        batches = rows // batch * train_config.steps_per_generation * train_config.num_iterations
    if not batches:
        of = "" if num_machines == 1 else f" ({batch // num_machines} on each of {num_machines} machines)"
        raise ConfigError(f"--data has {rows} rows, less than one batch of {batch}{of}; lower --batch.")
    epochs: float = train_config.num_train_epochs
    return math.ceil(epochs * max(math.ceil(batches / accumulated), 1))


# Memory and disk.


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a run needs, by purpose: in host memory, at least on each device, on disks."""

    host: Mapping[str, int]
    device: Mapping[str, int]
    disks: Sequence[Disk]
    parameters: int
    trainable: int

    def require(self, settings: TrainSettings) -> None:
        """Raise if host memory or disk do not suffice."""
        try:
            require_host_memory(
                self.host,
                "this run",
                "Use a smaller model, --lora R, with it --frozen-weights nf4, --moments 8bit, --master-bits 24, "
                "or a machine with more memory.",
            )
        except HostMemoryError as error:
            raise HostMemoryError(f"too little host memory: {error}") from None
        for disk in self.disks:
            if disk.needed > disk.free:
                table = memory_table({**disk.rows(), "missing": disk.needed - disk.free})
                raise ConfigError(f"too little disk space for {disk.folders}:\n{table}\n{disk.advice}")


def memory_needs(settings: TrainSettings, prepared: Prepared) -> Needs:
    """Estimate memory and disk from a model without weights (on the meta device)."""
    model = new_model(settings, prepared, torch.device("meta"))
    blocks = [model.get_submodule(path) for path in block_paths(model)]
    quantised = {} if prepared.quantised_as is None else quantised_parameters(model, local_folder(settings.model))
    if settings.lora is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, lora_config(settings))
        except ValueError as error:
            raise ConfigError(f"--lora: peft cannot make the adapter: {one_line(error)}") from error
    if settings.adapter is not None:
        model = on_paper(model, settings.adapter, prepared.dtype, "--model")
    parameters = sum(p.numel() for p in model.parameters())
    pack_on_paper(model, quantised)
    form = checked_form(settings.roundpipe.get("frozen_weights"))
    if form is not None:
        pack_frozen(model, form)
    optim_dtype = getattr(torch, settings.roundpipe.get("optim_dtype", "float32"))
    # REGISTER: what moving the weights needs depends on their memory, and this model has none. Wrapping counts it.
    moments = chosen_moments(settings.trainer.get("optim"), settings.roundpipe.get("moments"))
    with assumed_state(moments, is_on_disk=saves_memory(state_folder_of(settings))):
        optimizer = assumed_optimizer()
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    host = training_memory(
        [model],
        optim_dtype,
        PinMode.REGISTER,
        num_machines=prepared.num_machines,
        optimizer=optimizer,
        master_bits=settings.roundpipe.get("master_bits", 32),
        mapped_bytes=frozen_bytes if saves_memory(settings.weights_folder) else 0,
    )
    second = host.pop(SECOND_WEIGHTS)
    has_reference = settings.method.has_reference or (settings.method.is_rewarded and prepared.train_config.beta != 0)
    if has_reference and settings.lora is None and settings.adapter is None:
        host["weights of the reference model"] = sum(p.nbytes for p in model.parameters())
    if settings.roundpipe["is_async"]:
        host[SECOND_WEIGHTS] = second
    trainable = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.nbytes for p in trainable)
    state = optimizer.state_bytes(trainable, optim_dtype) // prepared.num_machines  # of one machine
    checkpoint = trained_bytes + (host["master weights"] + state) * prepared.num_machines
    count = _checkpoints_to_come(settings, prepared)
    return Needs(
        host={name: size for name, size in host.items() if size},
        device=_device_needs(model, blocks, prepared, settings.method.sequences),
        disks=disks_of(
            settings,
            {f"checkpoints ({count} of {checkpoint / 1e9:.3f} GB)": count * checkpoint, "final model": trained_bytes},
            {optimizer.row: state},
            weights_to_write(settings, frozen_bytes),
        ),
        parameters=parameters,
        trainable=sum(p.numel() for p in trainable),
    )


def _checkpoints_to_come(settings: TrainSettings, prepared: Prepared) -> int:
    """How many more checkpoints will be on the disk at a time than now."""
    config = prepared.train_config
    every = config.save_steps if config.save_steps >= 1 else config.save_steps * prepared.total_steps
    made = math.ceil(prepared.total_steps / float(every))
    if config.save_total_limit is None:
        return made
    present = len(list(settings.out.glob("checkpoint-*"))) if settings.out.is_dir() else 0
    # A new checkpoint is complete before the oldest one is removed.
    return max(1, min(made, int(config.save_total_limit) + 1) - present)


def _device_needs(model: nn.Module, blocks: list[nn.Module], prepared: Prepared, sequences: int) -> dict[str, int]:
    """What each device holds at least: the largest layer twice, its gradient, one microbatch."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    sizes += [p.nbytes for p in model.parameters() if id(p) not in inside]
    text_config, itemsize = prepared.model_config.get_text_config(), prepared.dtype.itemsize
    rows = math.ceil(prepared.train_config.per_device_train_batch_size / prepared.num_microbatch)
    tokens = rows * sequences * prepared.data.train_statistics.longest
    return {
        "two of the largest layers": 2 * max(sizes),
        "gradient of the largest layer": max(sizes),
        "inputs of the layers": len(blocks) * tokens * text_config.hidden_size * itemsize,
        "logits": tokens * text_config.vocab_size * itemsize,
    }


def report_dry_run(settings: TrainSettings, prepared: Prepared, needs: Needs, checkpoint: Path | None) -> None:
    config = prepared.train_config
    say("settings")
    rows: dict[str, Any] = {
        "model": settings.model,
        "method": settings.method.title,
        "weights": "random (--init)" if settings.init else f"{prepared.dtype}".removeprefix("torch."),
        "frozen weights": _frozen_in_words(settings, prepared),
        "parameters": f"{needs.parameters:,}, of which {needs.trainable:,} are trained",
        "starts from": checkpoint or "the beginning",
        "sequence length": settings.trainer["max_length"],
        "machines": prepared.num_machines,
        "sequences per step": config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * prepared.num_machines,
        "steps": prepared.total_steps,
        "learning rate": f"{config.learning_rate:g}, {settings.trainer['lr_scheduler_type']}",
        "steps are": "stale" if settings.roundpipe["is_async"] else "exact",
        "devices": ", ".join(f"{spec.kind}:{spec.index}" if spec.kind == "cuda" else "cpu" for spec in prepared.specs),
        "microbatches": prepared.num_microbatch,
        "optimizer's state": state_folder_of(settings) or "in host memory",
        "seed": config.seed,
        "output folder": settings.out,
    }
    for name, value in rows.items():
        say(f"  {name:<20} {value}")
    for title, counts in prepared.data.counts:
        say_fields(title, counts)
    available = available_host_bytes()
    say("host memory")
    say(memory_table({**needs.host, "needed in all": sum(needs.host.values()), "available": available or 0}))
    say("memory of each device, at least")
    say(memory_table({**needs.device, "needed in all": sum(needs.device.values()), **_device_limits(prepared.specs)}))
    for disk in needs.disks:
        say("disk" if len(needs.disks) == 1 else f"disk of {disk.folders}")
        say(memory_table(disk.rows()))


def _frozen_in_words(settings: TrainSettings, prepared: Prepared) -> str:
    form: str | None = settings.roundpipe.get("frozen_weights")
    if prepared.quantised_as is None:
        packed = form or "not packed"
    else:
        packed = f"as they come ({prepared.quantised_as})" + ("" if form is None else f", others {form}")
    return packed if settings.weights_folder is None else f"{packed}, mapped from {settings.weights_folder}"


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
        task_type="CAUSAL_LM" if settings.method.head is Head.TOKENS else "SEQ_CLS",
    )


def model_class(settings: TrainSettings, prepared: Prepared) -> Any:
    """The class of transformers that makes the model of a run."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if settings.method.head is not Head.TOKENS:
        return AutoModelForSequenceClassification
    reads_text = type(prepared.model_config) in MODEL_FOR_CAUSAL_LM_MAPPING or settings.trainer.get("trust_remote_code")
    return AutoModelForCausalLM if reads_text and not prepared.data.has_images else AutoModelForImageTextToText


def new_model(settings: TrainSettings, prepared: Prepared, device: torch.device) -> nn.Module:
    """A model of the config, with random weights or, on the meta device, without weights."""
    try:
        with device:
            model: nn.Module = model_class(settings, prepared).from_config(
                prepared.model_config, dtype=prepared.dtype, **model_options(settings)
            )
    except Exception as error:  # of the model's code, for a configuration that does not fit together
        raise ConfigError(f"--model: cannot build {settings.model}: {one_line(error)}") from error
    return model


def model_options(settings: TrainSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": bool(settings.trainer.get("trust_remote_code"))}
    if settings.attn_implementation is not None:
        options["attn_implementation"] = settings.attn_implementation
    return options
