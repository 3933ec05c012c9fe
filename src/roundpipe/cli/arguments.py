"""The options of `roundpipe train`: the command line, a YAML file with the same names, the checks of their values.

Every field of trl.SFTConfig is an option too. Knows names and values, never data, models or devices in use.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from roundpipe.devices import parse_devices
from roundpipe.errors import ConfigError

# Short options and the field of trl.SFTConfig that each one sets. Settings use the names of the fields.
_FIELD_OF = {
    "out": "output_dir",
    "seq_len": "max_length",
    "batch": "per_device_train_batch_size",
    "lr": "learning_rate",
    "schedule": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "keep": "save_total_limit",
}
_SHORT_OF = {field: short for short, field in _FIELD_OF.items()}
# Options that exclude each other. One of them on the command line removes the others from the config file.
_EXCLUSIVE = (("lora", "full"), ("exact", "stale"), ("num_train_epochs", "max_steps"))
_REFUSED = {
    "resume_from_checkpoint": "use --resume, alone or with a folder",
    "dataset_kwargs": "the command prepares the data itself",
    "padding_free": "it joins the batch into one sequence, which cannot be cut into microbatches; use --packing",
    "auto_find_batch_size": "the batch keeps its size; --num-microbatch decides how much of it is on a device",
    "deepspeed": "RoundPipe places the weights itself; name the devices with --devices",
    "fsdp": "RoundPipe places the weights itself; name the devices with --devices",
    "parallelism_config": "RoundPipe places the weights itself; name the devices with --devices",
    "fp16": "loss scaling needs gradients in device memory; use --dtype bfloat16, or --bf16 true for autocast",
    "fp16_full_eval": "a wrapped model cannot be cast; give the dtype of the weights with --dtype",
    "bf16_full_eval": "a wrapped model cannot be cast; give the dtype of the weights with --dtype",
    "debug": "it watches the modules of the plain model; --nonfinite stop names the module or parameter at fault",
    "torch_compile": "layers run one by one",
    "label_smoothing_factor": "TRL then runs two different forward passes before one backward pass",
    "use_liger_kernel": "it replaces code of the model after the model is wrapped. Head and loss are fused without it; "
    "for Liger's other kernels train in Python: RoundPipeSFTTrainer(model=wrap_model_to_roundpipe(model, "
    "liger_kernels=True), ...)",
}
_FLOAT16 = "small gradients and moments become zero in float16; use bfloat16 or float32"
_SMALL_STATE = re.compile("4bit|8bit|bnb|paged")  # optimizers of transformers that save device memory


def merge_command(adapter: str, merged: str) -> str:
    """The command that merges an adapter of PEFT into its model and saves the result."""
    source, target = json.dumps(adapter), json.dumps(merged)
    program = (
        "from peft import AutoPeftModelForCausalLM as Model; from transformers import AutoTokenizer as Tokenizer; "
        f"Model.from_pretrained({source}).merge_and_unload().save_pretrained({target}); "
        f"Tokenizer.from_pretrained({source}).save_pretrained({target})"
    )
    return shlex.join(["python", "-c", program])


_MERGE = f"the run saves the adapter alone. Merge it after the run: {merge_command('OUT', 'MERGED')} (two folders)"
# Options that axolotl, LLaMA-Factory, TRL and Unsloth have and this command has not, and the answer to a user who types
# one of them. The nearest spelling would lead astray.
_ELSEWHERE = {
    name: answer
    for names, answer in (
        ("merge merge-lora merge-adapter merge-and-unload save-method", _MERGE),
        ("save-gguf push-gguf", f"{_MERGE}. llama.cpp converts the result to GGUF"),
        (
            "load-in-4bit load-in-8bit quantization-bit quantization-method quantization bnb-4bit-quant-type "
            "bnb-4bit-quant-storage use-bnb-nested-quant",
            "quantized weights are not supported yet. The weights are in host memory, so device memory does not limit "
            "them; leave the option out",
        ),
        (
            "val-size val-set-size validation-split-percentage",
            "rows for evaluation are not split off; put them into a file of their own and give --eval-data FILE",
        ),
        ("eval-dataset test-datasets validation-file", "give --eval-data FILE_OR_DIR"),
        (
            "early-stopping-patience early-stopping-steps early-stopping-threshold",
            "early stopping is not supported yet by this command. In Python: RoundPipeSFTTrainer(..., "
            "callbacks=[EarlyStoppingCallback(early_stopping_patience=3)])",
        ),
        (
            "enable-liger-kernel liger-kernel liger-kernels liger-rope liger-rms-norm liger-glu-activation "
            "liger-fused-linear-cross-entropy",
            _REFUSED["use_liger_kernel"],
        ),
        ("model-name-or-path model-name base-model", "give --model DIR_OR_NAME"),
        (
            "dataset datasets dataset-name dataset-dir data-path train-file",
            "give files or folders: --data FILE_OR_DIR. A dataset of the hub becomes a folder with "
            "datasets.load_dataset(NAME, split='train').save_to_disk(DIR)",
        ),
        ("max-seq-length max-seq-len cutoff-len sequence-len block-size", "give --seq-len TOKENS"),
        ("batch-size train-batch-size", "give --batch, the number of sequences per step"),
        ("micro-batch-size", "give --batch, the number of sequences per step; --num-microbatch divides it"),
        ("num-epochs", "give --epochs"),
        ("optimizer", "give --optim"),
        ("lr-scheduler", "give --schedule"),
        ("warmup-ratio", "give --warmup; below 1 it is a share of all steps"),
        ("random-state", "give --seed"),
        ("torch-dtype", "give --dtype"),
        ("lora-r lora-rank r", "give --lora R"),
        ("use-peft adapter finetuning-type", "give --lora R for an adapter of rank R; without it, all weights train"),
        ("lora-target lora-target-linear", "give --lora R; --lora-target-modules NAME chooses modules"),
        (
            "use-dora use-rslora lora-modules-to-save loftq-config",
            "other adapters than plain LoRA need Python: RoundPipeSFTTrainer(..., peft_config=LoraConfig(...))",
        ),
        (
            "adapter-name-or-path lora-model-dir",
            "training an adapter further is not supported yet. Merge it into its model with "
            f"{merge_command('ADAPTER', 'MERGED')} and give --model MERGED",
        ),
        ("template chat-template", "the tokenizer has the chat template, or give --chat-template-path FILE.jinja"),
        (
            "sample-packing neat-packing",
            "give --packing. It joins rows into one stream, in which a row also sees the rows before it",
        ),
        (
            "train-on-inputs train-on-prompt",
            "give --completion-only-loss false, or for messages --assistant-only-loss false",
        ),
        ("max-samples", "make a file of the rows that you want: head -n 1000 data.jsonl > part.jsonl"),
        ("preprocessing-num-workers", "give --dataset-num-proc"),
        ("flash-attn flash-attention use-flash-attention-2", "give --attn-implementation flash_attention_2"),
        ("use-gradient-checkpointing", "leave it out: the plan decides what is recomputed"),
        (
            "num-gpus n-gpu gpus nproc-per-node num-processes device-map",
            'all GPUs of the machine are used; choose some with --devices "cuda:0,cuda:1"',
        ),
        (
            "wandb-project wandb-entity",
            "give --report-to wandb, and set the environment variables WANDB_PROJECT and WANDB_ENTITY",
        ),
        ("stage rl", "this command trains on the rows as they are (SFT). DPO needs Python: RoundPipeDPOTrainer(...)"),
        ("saves-per-epoch", "give --save-every STEPS"),
        ("evals-per-epoch", "give --eval-every STEPS"),
        ("dataset-prepared-path tokenized-path overwrite-cache", "leave it out: every start tokenizes the data"),
        ("pad-to-sequence-len", "leave it out: rows are padded to the longest one of their batch"),
        ("overwrite-output-dir", "a run never replaces another one; give another --out, or --resume"),
        ("save-path save-model", "the final model is always saved, into --out"),
        ("plot-loss", "leave it out: report.html in --out has the curves"),
    )
    for name in names.split()
}
_POSITIVE = (
    "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs",
    "max_steps", "eval_steps", "save_steps", "save_total_limit", "lora", "lora_alpha", "num_microbatch", "wait_limit",
)  # fmt: skip
# Options that are no fields of trl.SFTConfig. "seed" is both.
_NO_FIELDS = {
    "model", "data", "eval_data", "lora", "full", "init", "resume", "dry_run", "truncate", "text_rows", "exact",
    "stale", "lora_alpha", "lora_dropout", "lora_target_modules", "devices", "num_microbatch", "dtype", "optim_dtype",
    "pin_model", "attn_implementation", "nonfinite", "wait_limit", "no_view",
}  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")
_SEVERAL: Any = {"nargs": "+", "action": "extend"}  # values after one option, or after several ones of the same name
_INT_LIMIT = 2**31  # no option needs a larger whole number
_LORA_RATE, _FULL_RATE = 2e-4, 1e-5
_DEFAULTS: dict[str, Any] = {
    "max_length": 1024,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "num_train_epochs": 1.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 200,
    "save_total_limit": 3,
    "logging_steps": 1,
    "report_to": "none",
    "packing_strategy": "wrapped",
    # The weights have the dtype in which they train: no autocast. The plan decides what is recomputed.
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "prediction_loss_only": True,
}


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The size of a LoRA adapter and the modules that it changes."""

    rank: int
    alpha: float
    dropout: float
    target_modules: str | list[str]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """The settings of a run, checked as far as possible without data and model.

    data, eval_data: the rows of all files and folders, in this order.
    resume: None to start anew; "" for the newest checkpoint of `out`; "auto" for it if there is one; else a folder.
    dtype: of the weights; None for bfloat16 on GPUs and float32 on virtual devices.
    roundpipe: keyword arguments of RoundPipeOptions.
    sft: keyword arguments of trl.SFTConfig.
    given: the options that the user has given, by name, with the config file's.
    """

    model: str
    data: Sequence[Path]
    eval_data: Sequence[Path]
    out: Path
    lora: LoraSettings | None
    init: bool
    resume: str | None
    truncate: bool
    text_rows: str
    dry_run: bool
    dtype: str | None
    attn_implementation: str | None
    wait_limit_s: float | None
    roundpipe: Mapping[str, Any]
    sft: Mapping[str, Any]
    given: Mapping[str, Any]


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        # A field of SFTConfig has two spellings: --weight_decay/--weight-decay. The last one is named.
        raise ConfigError(re.sub(r"^argument (--[\w-]+/)*", "", message))


def parse(argv: Sequence[str]) -> TrainSettings:
    """Return the settings that a command line and its config file ask for. Raises ConfigError for mistakes."""
    parser = _Parser(
        prog="roundpipe train",
        usage="roundpipe train --model DIR_OR_NAME --data PATH --out DIR [options]",
        description="Fine-tune a causal language model; weights, gradients and optimizer state are in host memory.",
        epilog="Every field of trl.SFTConfig is an option too, such as --packing, --weight-decay 0.1 or --report-to "
        "tensorboard. "
        "docs/train.md describes all options, the data formats and how to resume.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # the result has exactly what the user gives
    )
    _add_own_options(parser)
    flags = _parse_source(parser, argv, "")
    config_path = flags.pop("config", None)
    given = flags
    if config_path is not None:
        from_file = _parse_source(parser, _file_to_argv(parser, Path(config_path)), f"{config_path}: ")
        for group in _EXCLUSIVE:
            if any(name in flags for name in group):
                from_file = {name: value for name, value in from_file.items() if name not in group}
        given = from_file | flags
    _check(given)
    return _settings(given)


def _add_fields(parser: _Parser) -> None:
    """Add the fields of trl.SFTConfig to the options. Does nothing if they are there already."""
    from transformers import HfArgumentParser
    from trl.trainer.sft_config import SFTConfig

    fields = HfArgumentParser(cast(Any, SFTConfig), add_help=False)
    for action in fields._actions:
        strings = [text for text in action.option_strings if text not in parser._option_string_actions]
        if strings:
            action.option_strings = strings
            action.default = action.help = argparse.SUPPRESS
            parser._add_action(action)


def _add_own_options(parser: _Parser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument("--model", metavar="DIR_OR_NAME", help="folder or hub name of the model and its tokenizer")
    run.add_argument(
        "--data",
        **_SEVERAL,
        metavar="FILE_OR_DIR",
        help=".jsonl or .txt files, folders of them, datasets folders; several are joined in their order",
    )
    run.add_argument("--out", metavar="DIR", help="folder for checkpoints, metrics, report and the final model")
    run.add_argument("--config", metavar="FILE", help="YAML file with the same names; the command line wins")
    run.add_argument("--lora", type=int, metavar="R", help="train a LoRA adapter of rank R")
    run.add_argument("--full", action="store_true", help="train all weights (default)")
    run.add_argument("--init", action="store_true", help="random weights from the model's config, seeded by --seed")
    run.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="go on from a checkpoint; default: newest; auto: if any"
    )
    run.add_argument("--dry-run", action="store_true", help="check all settings, data, memory and disk; train nothing")
    data = parser.add_argument_group("data")
    data.add_argument("--seq-len", type=int, help="tokens of the longest sequence (1024)")
    data.add_argument("--truncate", action="store_true", help="cut longer rows; without it they are refused")
    data.add_argument("--text-rows", choices=("line", "paragraph", "document"), help="rows of a .txt file (line)")
    data.add_argument("--eval-data", **_SEVERAL, metavar="FILE_OR_DIR", help="data for evaluation")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--batch", type=int, help="sequences per optimizer step (8)")
    steps.add_argument("--epochs", type=float, help="passes over the data (1)")
    steps.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
    steps.add_argument("--lr", type=float, help=f"learning rate (LoRA {_LORA_RATE:g}, full {_FULL_RATE:g})")
    steps.add_argument("--schedule", help="learning-rate schedule (cosine)")
    steps.add_argument("--warmup", type=float, help="warm-up steps, or a share of all steps below 1 (0.03)")
    steps.add_argument("--eval-every", type=int, help="steps between evaluations (once per epoch)")
    steps.add_argument("--save-every", type=int, help="steps between checkpoints (200)")
    steps.add_argument("--keep", type=int, help="number of checkpoints to keep (3)")
    steps.add_argument("--seed", type=int, help="seed of data order, dropout and --init (42)")
    steps.add_argument("--exact", action="store_true", help="each step uses the previous update (default)")
    steps.add_argument("--stale", action="store_true", help="each step uses the update before the previous one; faster")
    lora = parser.add_argument_group("LoRA")
    lora.add_argument("--lora-alpha", type=float, help="scale of the adapter (2 R)")
    lora.add_argument("--lora-dropout", type=float, help="dropout of the adapter's input (0)")
    lora.add_argument("--lora-target-modules", **_SEVERAL, metavar="NAME", help="modules (all linear layers of blocks)")
    hardware = parser.add_argument_group("devices and memory")
    hardware.add_argument("--devices", help='such as "cuda:0,cuda:1" or "cpu*2" (all GPUs, else one virtual device)')
    hardware.add_argument("--num-microbatch", type=int, help="microbatches per step (devices + 1, more if needed)")
    hardware.add_argument("--dtype", choices=_DTYPES, help="of the weights (bfloat16 on GPUs, float32 on CPU devices)")
    hardware.add_argument("--optim-dtype", choices=_DTYPES, help="of the optimizer's copies and state (float32)")
    hardware.add_argument("--pin-model", choices=("alloc", "register", "off"), help="how weights are pinned (alloc)")
    hardware.add_argument("--attn-implementation", help="attention of transformers, such as sdpa")
    guards = parser.add_argument_group("long runs")
    guards.add_argument("--nonfinite", choices=("stop", "skip", "off"), help="a loss or gradient not finite (stop)")
    guards.add_argument("--wait-limit", type=float, metavar="SECONDS", help="fail if a wait takes longer (no limit)")
    guards.add_argument("--no-view", action="store_true", help="do not show the run; files are written as ever")


def _parse_source(parser: _Parser, argv: Sequence[str], prefix: str) -> dict[str, Any]:
    """The options of one source, by the names of the settings. `prefix` begins its error messages."""
    try:
        namespace, rest = parser.parse_known_args(list(argv))
        if rest:  # only then: importing TRL takes seconds, and --help and mistakes should answer at once
            _add_fields(parser)
            namespace, rest = parser.parse_known_args(list(argv))
            _refuse_unknown(parser, rest)
        given: dict[str, Any] = {}
        for name, value in vars(namespace).items():
            field = _FIELD_OF.get(name, name)
            if field in given:
                raise ConfigError(f"{option(field)} and {option(field, full=True)} are the same setting; give one.")
            given[field] = value
        for group in _EXCLUSIVE:
            both = [option(name) for name in group if name in given]
            if len(both) > 1:
                raise ConfigError(f"{' and '.join(both)} exclude each other; give one.")
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None
    return given


def option(name: str, *, full: bool = False) -> str:
    """How the user writes a setting: the short option if there is one, unless `full`."""
    text = name if full else _SHORT_OF.get(name, name)
    return "--" + text.replace("_", "-")


def _refuse_unknown(parser: _Parser, rest: Sequence[str]) -> None:
    unknown = [text.split("=")[0] for text in rest if text.startswith("-")]
    if not rest:
        return
    if not unknown:
        raise ConfigError(f"{rest[0]!r} belongs to no option; write --data {rest[0]} if it is the data.")
    elsewhere = _ELSEWHERE.get(unknown[0].lstrip("-").replace("_", "-"))
    if elsewhere is not None:
        raise ConfigError(f"there is no option {unknown[0]}: {elsewhere}.")
    known = sorted({text.replace("_", "-") for text in parser._option_string_actions if text.startswith("--")})
    close = difflib.get_close_matches(unknown[0].replace("_", "-"), known, n=1)
    hint = f"did you mean {close[0]}?" if close else "roundpipe train --help lists the options."
    raise ConfigError(f"there is no option {unknown[0]}; {hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The entries of a YAML file with one mapping. Raises ValueError, with the file and the reason."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        str(content)  # fails for whole numbers with too many digits, of which YAML can have hexadecimal ones
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    # yaml's constructors raise ValueError, for dates, and others for values that are no YAML.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have lines such as `lr: 1e-4`, got a {type(content).__name__}")
    return content


def _file_to_argv(parser: _Parser, path: Path) -> list[str]:
    """The command line with the options of a YAML file, so that both sources are read and checked alike."""
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ConfigError(f"--config: {error}.") from error
    argv: list[str] = []
    for key, value in content.items():
        name = option(str(key), full=True)
        action = parser._option_string_actions.get(name)
        is_flag = action is not None and (action.nargs == 0 or key == "resume")
        if name == "--config":
            raise ConfigError(f"--config: {path} names another config file; put all options into one.")
        if value is None or (is_flag and value is False):
            continue
        if is_flag and value is True:
            argv.append(name)
        elif isinstance(value, list):
            argv += [name, *(str(each) for each in value)]
        elif isinstance(value, dict):
            try:
                argv += [name, json.dumps(value)]
            except (TypeError, ValueError) as error:  # such as dates, and mappings that contain themselves
                raise ConfigError(f"--config: {path}: {name} cannot be written as JSON: {error}.") from error
        else:
            argv.append(f"{name}={value}")
    return argv


def _check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for missing options and for values that are wrong whatever the data and the model are."""
    for name in ("model", "data", "output_dir"):
        if not given.get(name):
            raise ConfigError(f"{option(name)} is missing; roundpipe train needs --model, --data and --out.")
    _check_paths(given)
    _check_numbers(given)
    _check_precision(given)
    for name, reason in _REFUSED.items():
        if given.get(name):
            raise ConfigError(f"{option(name)} cannot be used here: {reason}.")
    if given.get("attn_implementation") == "flex_attention":
        raise ConfigError(
            "--attn-implementation flex_attention cannot be used here: it compiles itself, which torch does not allow "
            "inside a layer; use sdpa, eager or flash_attention_2."
        )
    if given.get("packing") and given.get("packing_strategy", "wrapped") != "wrapped":
        raise ConfigError(
            f"--packing-strategy {given['packing_strategy']} cannot be used here: {_REFUSED['padding_free']}."
        )
    if given.get("packing") and given.get("truncate"):
        raise ConfigError("--packing and --truncate exclude each other: packing cuts long rows and loses no token.")
    if given.get("init") and "lora" in given:
        raise ConfigError("--lora needs trained weights, --init makes random ones; leave one of them out.")
    lora_only = [name for name in ("lora_alpha", "lora_dropout", "lora_target_modules") if name in given]
    if lora_only and "lora" not in given:
        raise ConfigError(f"{option(lora_only[0])} needs --lora R.")
    if "eval_data" not in given and ("eval_steps" in given or given.get("eval_strategy", "no") != "no"):
        raise ConfigError("an evaluation needs data; give --eval-data FILE_OR_DIR.")
    if "lr_scheduler_type" in given:
        _check_schedule(given["lr_scheduler_type"])
    parse_devices(given.get("devices"))


def _check_paths(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for names that no file can have."""
    for name in ("model", "data", "eval_data", "output_dir", "resume"):
        value = given.get(name, ())
        for path in [value] if isinstance(value, str) else value:
            if not path and name != "resume":
                raise ConfigError(f"{option(name)} has an empty name; give a path.")
            if "\0" in path:
                raise ConfigError(f"{option(name)}: {path!r} has a zero byte, which no name of a file has.")
            try:
                os.stat(path)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    raise ConfigError(f"{option(name)}: the name {path!r} is too long for the file system.") from error


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if type(value) is int and name != "seed" and abs(value) >= _INT_LIMIT:
            raise ConfigError(f"{option(name)} must be less than {_INT_LIMIT}, got {str(value)[:24]}.")
    for name in (*_POSITIVE, "warmup_steps", "weight_decay", "max_grad_norm"):
        if not math.isfinite(given.get(name, 0)):
            raise ConfigError(f"{option(name)} must be a finite number, got {given[name]:g}.")
    for name in _POSITIVE:
        if name in given and not given[name] > 0:
            raise ConfigError(f"{option(name)} must be greater than 0, got {given[name]:g}.")
    if given.get("max_length") == 1:
        raise ConfigError("--seq-len must be at least 2, got 1: the first token of a sequence has no loss.")
    if not 0 <= given.get("lora_dropout", 0) < 1:
        raise ConfigError(f"--lora-dropout must be at least 0 and less than 1, got {given['lora_dropout']:g}.")
    if given.get("warmup_steps", 0) < 0:
        raise ConfigError(f"--warmup must not be negative, got {given['warmup_steps']:g}.")
    if not 0 <= given.get("seed", 0) < 2**32:
        raise ConfigError(f"--seed must be between 0 and 2**32 - 1, got {given['seed']}.")


def _check_precision(given: Mapping[str, Any]) -> None:
    for name in ("dtype", "optim_dtype"):
        if given.get(name) == "float16":
            raise ConfigError(f"{option(name)} float16 cannot be used here: {_FLOAT16}.")
    if _SMALL_STATE.search(given.get("optim", "")):
        raise ConfigError(
            f"--optim {given['optim']} cannot be used here: it saves device memory, but the optimizer's state is in "
            "host memory. Leave it out for AdamW; --optim-dtype bfloat16 halves the state, but loses small updates."
        )


def _check_schedule(name: str) -> None:
    from transformers.trainer_utils import SchedulerType

    known = [each.value for each in SchedulerType]
    if name not in known:
        raise ConfigError(f"--schedule {name} is unknown; give one of {', '.join(known)}.")


def _settings(given: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run; options that are not given get their defaults."""
    sft = _DEFAULTS | {name: value for name, value in given.items() if name not in _NO_FIELDS}
    sft.setdefault("learning_rate", _LORA_RATE if "lora" in given else _FULL_RATE)
    sft.setdefault("per_device_eval_batch_size", sft["per_device_train_batch_size"])
    sft["use_cpu"] = parse_devices(given.get("devices"))[0].kind == "cpu"
    if "eval_data" in given:
        sft.setdefault("eval_strategy", "steps" if "eval_steps" in given else "epoch")
    roundpipe = {name: given[name] for name in ("devices", "num_microbatch", "pin_model", "nonfinite") if name in given}
    roundpipe["is_async"] = given.get("stale", False)
    roundpipe["view"] = not given.get("no_view", False)
    if "optim_dtype" in given:
        roundpipe["optim_dtype"] = given["optim_dtype"]
    return TrainSettings(
        model=given["model"],
        data=[Path(each) for each in given["data"]],
        eval_data=[Path(each) for each in given.get("eval_data", ())],
        out=Path(given["output_dir"]),
        lora=_lora_settings(given) if "lora" in given else None,
        init=given.get("init", False),
        resume=given.get("resume"),
        truncate=given.get("truncate", False),
        text_rows=given.get("text_rows", "line"),
        dry_run=given.get("dry_run", False),
        dtype=given.get("dtype"),
        attn_implementation=given.get("attn_implementation"),
        wait_limit_s=given.get("wait_limit"),
        roundpipe=roundpipe,
        sft=sft,
        given=given,
    )


def _lora_settings(given: Mapping[str, Any]) -> LoraSettings:
    rank = given["lora"]
    return LoraSettings(
        rank=rank,
        alpha=given.get("lora_alpha", 2 * rank),
        dropout=given.get("lora_dropout", 0.0),
        target_modules=given.get("lora_target_modules", "all-linear"),
    )
