"""Reads the options of `roundpipe train` from the command line and a YAML file with the same names, and checks them.

`cli/options` has the table of options; every field of the method's config class is an option too. Knows names and
values, never data, models or devices in use.
"""

from __future__ import annotations

import argparse
import contextlib
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

from roundpipe.cli.adapters import read_adapter_config
from roundpipe.cli.methods import METHODS, Head, Method
from roundpipe.cli.option_kinds import Receiver
from roundpipe.cli.options import EXCLUSIVE, NAME_OF_SHORT, OPTIONS, option
from roundpipe.compiled import CompileOptions
from roundpipe.devices import parse_devices
from roundpipe.errors import ConfigError
from roundpipe.integrations.optimizers import chosen_moments, is_replaced

_FLOAT16 = "small gradients and moments become zero in float16; use bfloat16 or float32"
_SMALL_STATE = re.compile("4bit|8bit|32bit|bnb|paged")  # optimizers of transformers that save device memory
_INT_LIMIT = 2**31  # no option needs a larger whole number


def merge_command(adapter: str, merged: str) -> str:
    """The command that merges an adapter of PEFT into its model and saves the result."""
    return shlex.join(["roundpipe", "merge", adapter, "--out", merged])


_MERGE = f"the run saves the adapter alone. Merge it after the run: {merge_command('OUT', 'MERGED')} (two folders)"
# Names that other tools have for what no option of this command does, and the answer to a user who types one.
_NO_OPTION = {
    "merge merge-lora merge-adapter merge-and-unload save-method": _MERGE,
    "save-gguf push-gguf": f"{_MERGE}. llama.cpp converts the result to GGUF",
    "early-stopping-threshold": "any lower loss counts as better; give --early-stopping N alone",
    "use-dora use-rslora lora-modules-to-save loftq-config": "other adapters than plain LoRA need Python: "
    "RoundPipeSFTTrainer(..., peft_config=LoraConfig(...))",
    "beta precompute-ref-log-probs": "it belongs to --method dpo, kto or orpo; give the method, too",
    "pref-beta dpo-beta kto-beta orpo-beta": "it is called beta here; give --method dpo, kto or orpo with it",
    "pref-loss simpo-gamma": "give --method dpo; its option loss-type chooses the loss",
    "num-labels": "leave it out: the rows of --data have the classes",
    "strict do-sample special-tokens tokenizer-type model-type tokenizer-config": "leave it out",
    "dataset-prepared-path tokenized-path overwrite-cache": "leave it out: every start tokenizes the data",
    "pad-to-sequence-len": "leave it out: rows are padded to the longest one of their batch",
    "plot-loss": "leave it out: report.html in --out has the curves",
}
# The answer to a user who types a name that another tool has for an option. The nearest spelling would lead astray.
_ELSEWHERE = {
    name: answer
    for answers in (_NO_OPTION, *(each.elsewhere for each in OPTIONS.values()))
    for names, answer in answers.items()
    for name in names.split()
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
    weights: of the entries of data; None to take each row once.
    eval_split: share or number of rows of data to evaluate; None for none.
    resume: None to start anew; "" for the newest checkpoint of `out`; "auto" for it if there is one; else a folder.
    dtype: of the weights; None for bfloat16 on GPUs and float32 on virtual devices.
    form: of the rows, a name of shapes.SHAPES; None to recognize it.
    rewards: functions, each FILE.py:NAME.
    samples: file with prompts that the model answers while it trains.
    sample_tokens: of the longest such answer.
    roundpipe: keyword arguments of RoundPipeOptions.
    trainer: fields of the method's config class, and some that not all such classes have.
    given: the options that the user has given, by name, with the config file's.
    """

    model: str
    method: Method
    data: Sequence[Path]
    weights: Sequence[float] | None
    eval_data: Sequence[Path]
    eval_split: float | None
    out: Path
    lora: LoraSettings | None
    adapter: Path | None
    init: bool
    resume: str | None
    truncate: bool
    streaming: bool
    shuffle_buffer: int
    text_rows: str
    form: str | None
    rewards: Sequence[str]
    dry_run: bool
    dtype: str | None
    weights_folder: Path | None
    attn_implementation: str | None
    wait_limit_s: float | None
    early_stopping: int | None
    price_per_hour: float | None
    samples: Path | None
    sample_tokens: int
    roundpipe: Mapping[str, Any]
    trainer: Mapping[str, Any]
    given: Mapping[str, Any]


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError where argparse prints the usage and exits."""

    method: Method = METHODS["sft"]

    def error(self, message: str) -> NoReturn:
        # A field has two spellings: --weight_decay/--weight-decay. The last one is named.
        text = re.sub(r"^argument (--[\w-]+/)*", "", message)
        if lacking := re.fullmatch(r"(--[\w-]+): expected (one|at least one) argument", text):
            text = self._without_value(lacking[1])
        elif wrong := re.fullmatch(r"(--[\w-]+): invalid (int|float) value: (.*)", text):
            kind = "whole number" if wrong[2] == "int" else "number"
            text = f"{wrong[1]} needs a {kind}{', such as 0.05' if '%' in wrong[3] else ''}, got {wrong[3]}."
        raise ConfigError(text)

    def _without_value(self, written: str) -> str:
        """What to say of an option without its value."""
        name = written.removeprefix("--").replace("-", "_")
        option = OPTIONS.get(NAME_OF_SHORT.get(name, name))
        if option is None or option.heading is None:
            return f"{written} needs a value."
        value = option.reading.get("metavar") or "|".join(option.reading.get("choices", ())) or option.name.upper()
        return f"{written} needs a value: {written} {value} ({option.help})."


def parse(argv: Sequence[str]) -> TrainSettings:
    """Return the settings that a command line and its config file ask for. Raises ConfigError for mistakes."""
    parser = _Parser(
        prog="roundpipe train",
        usage="roundpipe train --model DIR_OR_NAME --data PATH --out DIR [options]",
        description="Fine-tune a language model; weights, gradients and optimizer state are in host memory.",
        epilog="Every field of the method's config class (trl.SFTConfig, trl.DPOConfig, ...) is an option too, such as "
        "--packing, --weight-decay 0.1 or --report-to tensorboard. "
        "docs/train.md describes all options, the data formats and how to resume.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # the result has exactly what the user gives
    )
    _add_own_options(parser)
    parser.method = _method_of(parser, argv)
    flags = _parse_source(parser, argv, "")
    config_path = flags.pop("config", None)
    given = flags
    if config_path is not None:
        from_file = _parse_source(parser, _file_to_argv(parser, Path(config_path)), f"{config_path}: ")
        for group in EXCLUSIVE:
            if any(name in flags for name in group):
                from_file = {name: value for name, value in from_file.items() if name not in group}
        given = from_file | flags
    if given.get("adapter") in ("lora", "qlora") and not Path(given["adapter"]).exists():
        raise ConfigError("--adapter is the folder of an adapter to train further; for a new one give --lora R.")
    if given.get("adapter") and "model" not in given:
        base = read_adapter_config(Path(given["adapter"])).get("base_model_name_or_path")
        given |= {"model": base} if base else {}
    _check(given)
    return _settings(given)


def _method_of(parser: _Parser, argv: Sequence[str]) -> Method:
    """The method that the command line or its config file names: other options depend on it."""
    own, _ = parser.parse_known_args(list(argv))
    name = getattr(own, "method", None)
    if name is None and hasattr(own, "config"):
        with contextlib.suppress(ValueError):  # mistakes are reported when the whole file is read
            name = read_yaml(Path(own.config)).get("method")
    return METHODS.get(str(name), METHODS["sft"])


def _add_fields(parser: _Parser) -> None:
    """Add the fields of the method's config class to the options. Does nothing if they are there already."""
    from transformers import HfArgumentParser

    fields = HfArgumentParser(cast(Any, parser.method.config_class()), add_help=False)
    for action in fields._actions:
        strings = [text for text in action.option_strings if text not in parser._option_string_actions]
        if strings:
            action.option_strings = strings
            action.default = action.help = argparse.SUPPRESS
            parser._add_action(action)


def _add_own_options(parser: _Parser) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in OPTIONS.values():
        if each.heading is not None:
            if each.heading not in groups:
                groups[each.heading] = parser.add_argument_group(each.heading)
            groups[each.heading].add_argument(each.written(), help=each.help_line(), **each.reading)


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
            field = NAME_OF_SHORT.get(name, name)
            if field in given:
                raise ConfigError(f"{option(field)} and {option(field, full=True)} are the same setting; give one.")
            given[field] = value
        for group in EXCLUSIVE:
            both = [option(name) for name in group if name in given]
            if len(both) > 1:
                raise ConfigError(f"{' and '.join(both)} exclude each other; give one.")
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None
    return given


def _refuse_unknown(parser: _Parser, rest: Sequence[str]) -> None:
    """Raise ConfigError for words that belong to no option: all of them, so that a user corrects them at once."""
    unknown = list(dict.fromkeys(text.split("=")[0] for text in rest if text.startswith("-")))
    if not rest:
        return
    if not unknown:
        raise ConfigError(f"{rest[0]!r} belongs to no option; {_option_of(rest[0])}.")
    known = sorted({text.replace("_", "-") for text in parser._option_string_actions if text.startswith("--")})
    answers = [_answer(name, known) for name in unknown]
    if len(unknown) == 1:
        raise ConfigError(f"there is no option {unknown[0]}{answers[0]}")
    lines = [f"  {name}{answer}" for name, answer in zip(unknown, answers, strict=True)]
    raise ConfigError("\n".join(["there are no such options:", *lines]))


def _option_of(word: str) -> str:
    """What a user may have meant by a word without an option."""
    if word.endswith((".yaml", ".yml")):
        return f"write --config {word} if it is the file of options"
    if (Path(word) / "config.json").is_file():
        return f"write --model {word} if it is the model"
    return f"write --data {word} if it is the data"


def _answer(name: str, known: Sequence[str]) -> str:
    """The end of the sentence that there is no such option."""
    plain = name.replace("_", "-")
    elsewhere = _ELSEWHERE.get(plain.lstrip("-"))
    if elsewhere is not None:
        return f": {elsewhere}."
    close = difflib.get_close_matches(plain, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; roundpipe train --help lists the options."


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
    for each in OPTIONS.values():
        if each.is_needed and not given.get(each.name):
            raise ConfigError(f"{each.written()} is missing; {_all_needed(given)}.")
    _check_paths(given)
    _check_weights(given)
    _check_rewards(given)
    _check_numbers(given)
    _check_precision(given)
    for each in OPTIONS.values():
        if each.refused and given.get(each.name):
            raise ConfigError(f"{each.written()} cannot be used here: {each.refused}.")
    if given.get("attn_implementation") == "flex_attention":
        raise ConfigError(
            "--attn-implementation flex_attention cannot be used here: it compiles itself, which torch does not allow "
            "inside a layer; use sdpa, eager or flash_attention_2."
        )
    if given.get("packing") and given.get("packing_strategy", "wrapped") != "wrapped":
        raise ConfigError(
            f"--packing-strategy {given['packing_strategy']} cannot be used here: {OPTIONS['padding_free'].refused}."
        )
    if given.get("packing") and given.get("truncate"):
        raise ConfigError("--packing and --truncate exclude each other: packing cuts long rows and loses no token.")
    for name in ("lora", "adapter"):
        if given.get("init") and name in given:
            raise ConfigError(f"--{name} needs trained weights, --init makes random ones; leave one of them out.")
    if given.get("full") and "adapter" in given:
        raise ConfigError(
            "--adapter and --full exclude each other; to train all weights, merge the adapter first: "
            f"{merge_command(given['adapter'], 'MERGED')}."
        )
    _check_packing(given)
    _check_streaming(given)
    for each in OPTIONS.values():
        if each.needs and each.name in given and each.needs not in given:
            needed = " ".join([option(each.needs), OPTIONS[each.needs].reading.get("metavar", "")]).rstrip()
            raise ConfigError(f"{each.written()} needs {needed}.")
    has_eval_rows = "eval_data" in given or "eval_split" in given
    if not has_eval_rows and ("eval_steps" in given or given.get("eval_strategy", "no") != "no"):
        raise ConfigError("an evaluation needs data; give --eval-data FILE_OR_DIR or --eval-split SHARE.")
    if not has_eval_rows and "early_stopping" in given:
        raise ConfigError("--early-stopping needs evaluations; give --eval-data FILE_OR_DIR or --eval-split SHARE.")
    if "lr_scheduler_type" in given:
        _check_schedule(given["lr_scheduler_type"])
    parse_devices(given.get("devices"))
    CompileOptions.of({"backend": given.get("torch_compile_backend"), "mode": given.get("torch_compile_mode")})


def _all_needed(given: Mapping[str, Any]) -> str:
    """What a command line that lacks an option needs; the options of the run that is to be resumed are in a file."""
    for folder in (given.get("resume"), given.get("output_dir")) if "resume" in given else ():
        if folder and (Path(folder) / "train.yaml").is_file():
            return (
                f"to resume that run: {shlex.join(['roundpipe', 'train', '--config', f'{folder}/train.yaml'])} --resume"
            )
    return "roundpipe train needs --model, --data and --out, roundpipe data the first two"


def _packing(given: Mapping[str, Any]) -> str | None:
    """The form of frozen weights, by whichever name it was asked for."""
    asked = [form for name, form in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")) if given.get(name)]
    if len(asked) > 1:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other.")
    form: str | None = asked[0] if asked else given.get("frozen_weights")
    return form


def _check_packing(given: Mapping[str, Any]) -> None:
    form = _packing(given)
    if form is not None and "lora" not in given and "adapter" not in given:
        raise ConfigError(
            f"--frozen-weights {form} packs weights that do not train, but without an adapter all weights train; add "
            "--lora R or --adapter DIR, or leave it out."
        )
    if form is not None and given.get("model_init_kwargs"):
        raise ConfigError(
            "--model-init-kwargs are for from_pretrained(), but with --frozen-weights the model is read tensor by "
            "tensor; leave one of them out."
        )
    if "weights_folder" in given:
        _check_mapping(given, form)


def _check_mapping(given: Mapping[str, Any], form: str | None) -> None:
    if form is None:
        raise ConfigError("--weights-folder is for packed weights; add --frozen-weights nf4, int8 or fp8.")
    if given.get("pin_model", "off") != "off":
        raise ConfigError(
            f"--pin-model {given['pin_model']} brings weights into memory, and --weights-folder leaves them on the "
            "disk; leave one of them out."
        )
    if METHODS[given.get("method", "sft")].head is not Head.TOKENS:
        raise ConfigError(
            f"--weights-folder is for models that are read from their files as they are, and --method "
            f"{given['method']} makes a new head; leave one of them out."
        )


def _check_streaming(given: Mapping[str, Any]) -> None:
    if not given.get("streaming"):
        return
    method = given.get("method", OPTIONS["method"].default)
    if method != "sft":
        raise ConfigError(f"--streaming and --method {method} exclude each other: only --method sft reads rows so.")
    if "eval_split" in given:
        raise ConfigError("--streaming and --eval-split exclude each other; give --eval-data FILE_OR_DIR.")
    if given.get("dataloader_num_workers"):
        raise ConfigError("--streaming and --dataloader-num-workers exclude each other: one process reads the rows.")


def _check_paths(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for names that no file can have."""
    for name in (each.name for each in OPTIONS.values() if each.is_path):
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


def split_weight(given: str) -> tuple[str, float | None]:
    """The path and the weight of an entry of --data. A file whose name has an = is itself."""
    path, equals, text = given.rpartition("=")
    if not equals or os.path.exists(given):
        if (named := re.fullmatch(r"(.+)[:@]([0-9.]+%?)", given)) and os.path.exists(named[1]):
            raise ConfigError(f"--data {given}: a weight follows the sign =, such as {named[1]}=0.7.")
        return given, None
    try:
        return path, float(text)
    except ValueError:
        if os.path.exists(path):
            raise ConfigError(f"--data {given}: the weight {text!r} is no number; give {path}=0.7.") from None
        return given, None


def _check_weights(given: Mapping[str, Any]) -> None:
    sources = [split_weight(each) for each in given["data"]]
    for path, weight in sources:
        if weight is not None and not 0 < weight < math.inf:
            raise ConfigError(f"--data {path}={weight:g}: a weight must be a finite number greater than 0.")
    without = [path for path, weight in sources if weight is None]
    if without and len(without) < len(sources):
        raise ConfigError(
            f"--data {without[0]} has no weight, others have one; give {without[0]}=WEIGHT, or none at all."
        )


def _check_rewards(given: Mapping[str, Any]) -> None:
    name = given.get("method", OPTIONS["method"].default)
    if METHODS[name].is_rewarded and "reward" not in given:
        raise ConfigError(f"--method {name} needs functions that reward answers; give --reward FILE.py:FUNCTION.")
    if "reward" in given and not METHODS[name].is_rewarded:
        raise ConfigError(f"--reward has no meaning for --method {name}; give --method grpo.")
    if "samples" in given and METHODS[name].head is not Head.TOKENS:
        raise ConfigError(
            f"--samples needs a model that answers, and --method {name} trains {METHODS[name].head.value}; leave "
            "--samples out."
        )
    if METHODS[name].is_rewarded and given.get("init") and given.get("beta"):
        raise ConfigError("--beta needs trained weights, which the reference has; --init makes random ones.")


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if type(value) is int and name != "seed" and abs(value) >= _INT_LIMIT:
            raise ConfigError(f"{option(name)} must be less than {_INT_LIMIT}, got {str(value)[:24]}.")
    for name in (name for name in OPTIONS if name in given):
        for bound in OPTIONS[name].bounds:
            if not bound.holds(given[name]):
                value = given[name] if name == "seed" else f"{given[name]:g}"
                raise ConfigError(f"{option(name)} must {bound.text}, got {value}.")
    if given.get("max_length") == 1:
        raise ConfigError("--seq-len must be at least 2, got 1: the first token of a sequence has no loss.")


def _check_precision(given: Mapping[str, Any]) -> None:
    for name in ("dtype", "optim_dtype"):
        if given.get(name) == "float16":
            raise ConfigError(f"{option(name)} float16 cannot be used here: {_FLOAT16}.")
    optim = given.get("optim", "")
    if _SMALL_STATE.search(optim) and not is_replaced(optim):
        raise ConfigError(
            f"--optim {optim} cannot be used here: it saves device memory, but the optimizer's state is in host "
            "memory. Leave it out for AdamW, and give --moments 8bit for a quarter of the state."
        )
    moments, dtype = chosen_moments(optim, given.get("moments")), given.get("optim_dtype", "float32")
    if moments != "float32" and dtype != "float32":
        raise ConfigError(f"moments in low bits ({moments}) need --optim-dtype float32, got {dtype}.")
    bits = given.get("master_bits", 32)
    if bits != 32 and dtype != "float32":
        raise ConfigError(f"--master-bits {bits} needs --optim-dtype float32, got {dtype}.")


def _check_schedule(name: str) -> None:
    from transformers.trainer_utils import SchedulerType

    known = [each.value for each in SchedulerType]
    if name not in known:
        raise ConfigError(f"--schedule {name} is unknown; give one of {', '.join(known)}.")


def _settings(given: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run; options that are not given get their defaults."""
    values = {**{name: each.default for name, each in OPTIONS.items()}, **given}
    defaults = {each.name: each.default for each in OPTIONS.values() if each.default is not None}
    method = METHODS[values["method"]]
    trainer = {name: value for name, value in {**defaults, **given}.items() if _receiver(name) is Receiver.TRAINER}
    has_adapter = "lora" in given or "adapter" in given
    trainer.setdefault("learning_rate", method.lora_rate if has_adapter else method.full_rate)
    trainer.setdefault("per_device_eval_batch_size", trainer["per_device_train_batch_size"])
    trainer["use_cpu"] = parse_devices(given.get("devices"))[0].kind == "cpu"
    if "eval_data" in given or "eval_split" in given:
        trainer.setdefault("eval_strategy", "steps" if "eval_steps" in given else "epoch")
    if values["early_stopping"] is not None:
        # A checkpoint at each evaluation, of which the best one stays; the count of evaluations is kept in it.
        trainer |= {"save_strategy": trainer["eval_strategy"], "save_steps": trainer.get("eval_steps", 500)}
        trainer |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        trainer["restore_callback_states_from_checkpoint"] = True
    roundpipe = {name: value for name, value in given.items() if _receiver(name) is Receiver.ROUNDPIPE}
    if _packing(given) is not None:
        roundpipe["frozen_weights"] = _packing(given)
    if "weights_folder" in given:
        roundpipe["pin_model"] = "off"  # pinning would bring the weights into memory
    sources = [split_weight(each) for each in values["data"]]
    return TrainSettings(
        model=values["model"],
        method=method,
        data=[Path(path) for path, _ in sources],
        weights=None if sources[0][1] is None else [weight for _, weight in sources if weight is not None],
        eval_data=[Path(each) for each in values["eval_data"]],
        eval_split=values["eval_split"],
        out=Path(values["output_dir"]),
        lora=None if values["lora"] is None else _lora_settings(values),
        adapter=None if values["adapter"] is None else Path(values["adapter"]),
        init=values["init"],
        resume=values["resume"],
        truncate=values["truncate"],
        streaming=values["streaming"],
        shuffle_buffer=values["shuffle_buffer"],
        text_rows=values["text_rows"],
        form=values["form"],
        rewards=values["reward"],
        dry_run=values["dry_run"],
        dtype=values["dtype"],
        weights_folder=None if values["weights_folder"] is None else Path(values["weights_folder"]),
        attn_implementation=values["attn_implementation"],
        wait_limit_s=values["wait_limit"],
        early_stopping=values["early_stopping"],
        price_per_hour=values["price_per_hour"],
        samples=None if values["samples"] is None else Path(values["samples"]),
        sample_tokens=values["sample_tokens"],
        roundpipe=roundpipe | {"is_async": values["stale"], "view": not values["no_view"]},
        trainer=trainer,
        given=given,
    )


def _receiver(name: str) -> Receiver:
    """Which object gets a setting; fields outside of the table are the trainer's."""
    return OPTIONS[name].receiver if name in OPTIONS else Receiver.TRAINER


def _lora_settings(values: Mapping[str, Any]) -> LoraSettings:
    rank, alpha = values["lora"], values["lora_alpha"]
    return LoraSettings(
        rank=rank,
        alpha=2 * rank if alpha is None else alpha,
        dropout=values["lora_dropout"],
        target_modules=values["lora_target_modules"],
    )
