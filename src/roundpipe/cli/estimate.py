"""The command `roundpipe estimate`: memory, plan and time of a training step, for a model and a machine on paper.

Reads a model's configuration, never its weights. `estimate.estimate` does the work; this file parses and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundpipe.devices import device_count, gpu_facts
from roundpipe.errors import ConfigError
from roundpipe.estimate.estimate import SAVED_INPUTS, Estimate, Machine, Work, estimate
from roundpipe.estimate.figures import SHAPES, DeviceFigures, gpu_named, parse_gpus, parse_ram
from roundpipe.estimate.layer_costs import PaperModel, add_adapters, causal_lm_on_paper
from roundpipe.host_facts import available_host_bytes
from roundpipe.loading import quantised_as, quantised_parameters
from roundpipe.optim import rules
from roundpipe.packed import FORMS, checked_form, num_elements, pack_frozen
from roundpipe.packed.choice import pack_on_paper
from roundpipe.plan import TaskKind
from roundpipe.plan.forecast import Network
from roundpipe.store.forms import MOMENTS
from roundpipe.store.host_memory import memory_table
from roundpipe.store.training_memory import PaperOptimizer
from roundpipe.store.values import MASTER_BITS

_DONE, _DOES_NOT_FIT = 0, 1
_INDENT = " " * 11
_SMALLEST_ROW = 500_000  # bytes; a smaller part would be printed as 0.000 GB
_EXAMPLE = "roundpipe estimate qwen3-8b --devices 1x24GB --ram 160 --batch 16 --seq-len 4096 --full"
# Rate of the optimizer's kernel in training with 14 threads of a server; on the idle machine it is 1.5 times as high.
_PARAMETERS_PER_S = 4e9
_NETWORK_GBITS = 25.0
_DISK_GBYTES = 2.0  # GB/s that an NVMe drive of a server reads and writes in turn, for minutes
# The optimizers of --optimizer: their names, their rules, and the options that decide how much state they have.
_OPTIMIZERS: Mapping[str, tuple[str, rules.Rule, rules.Group]] = {
    "adam": ("Adam", rules.ADAM, {"amsgrad": False}),
    "lion": ("Lion", rules.LION, {}),
    "sgd": ("SGD", rules.SGD, {"momentum": 0.0}),
    "sgd-momentum": ("SGD with momentum", rules.SGD, {"momentum": 0.9}),
}
_MOST_MICROBATCHES = 10_000  # the time of an estimate grows with them


def run(words: Sequence[str]) -> int:
    """Estimate a step and write the report. Returns 1 if it does not fit, else 0."""
    options = parser().parse_args(list(words))
    if options.master_bits != 32 and options.dtype != "bfloat16":
        raise ConfigError(f"--master-bits {options.master_bits} needs --dtype bfloat16, got {options.dtype}.")
    machine = _machine(options)
    if options.frozen_weights is not None and options.lora is None:
        raise ConfigError(
            f"--frozen-weights {options.frozen_weights} packs weights that do not train, and --full trains all; add "
            "--lora R."
        )
    paper = load_on_paper(options.model, getattr(torch, options.dtype), options.lora, options.frozen_weights)
    work = Work(
        batch=options.batch,
        length=options.seq_len,
        is_exact=not options.stale,
        num_microbatch=None if options.microbatches is None else min(options.microbatches, options.batch),
        optimizer=_optimizer_named(options),
        master_bits=options.master_bits,
    )
    found = estimate(paper, work, machine)
    report = as_json if options.json else as_text
    sys.stdout.write(report(options.model, paper, work, machine, found))
    return _DONE if found.fits else _DOES_NOT_FIT


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="roundpipe estimate",
        description="Estimate a training step: memory, plan, time, and what bounds it. Needs neither the weights nor "
        f"the machine. Exit code 1: it does not fit. Example: {_EXAMPLE}",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a model folder, a config.json, a name on the hub (Qwen/Qwen3-8B), or one of: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--devices", help="GPUs: 2xRTX4090, 1x24GB or 1x24GiB, 1xH200:24GB; default: those of this machine"
    )
    parser.add_argument(
        "--ram", metavar="SIZE", help="host memory: 128 (GiB), 128GiB or 128GB; default: what is available here"
    )
    parser.add_argument("--batch", type=_count, default=16, help="sequences per step and machine (default 16)")
    parser.add_argument("--seq-len", type=_count, default=4096, help="tokens per sequence (default 4096)")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--full", action="store_true", help="train all parameters (the default)")
    trained.add_argument(
        "--lora", type=_count, metavar="R", help="train adapters of rank R on the linear layers of the blocks"
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--exact", action="store_true", help="exact steps (the default)")
    steps.add_argument("--stale", action="store_true", help="asynchronous steps, one update old")
    parser.add_argument(
        "--microbatches",
        type=partial(_count, most=_MOST_MICROBATCHES),
        metavar="M",
        help="at most one per sequence; default: the fastest number that fits",
    )
    _add_precisions_and_optimizer(parser)
    _add_rates(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_precisions_and_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights"
    )
    parser.add_argument(
        "--frozen-weights",
        choices=tuple(FORMS),
        help="with --lora: the form in which linear weights that do not train are packed (default: that of --dtype)",
    )
    parser.add_argument(
        "--optimizer", choices=tuple(_OPTIMIZERS), default="adam", help="of roundpipe.optim (default adam, also AdamW)"
    )
    parser.add_argument(
        "--moments", choices=MOMENTS, default="float32", help="how the optimizer stores moments (default float32)"
    )
    parser.add_argument(
        "--master-bits",
        type=int,
        choices=MASTER_BITS,
        default=32,
        help="of the masters of bfloat16 weights (default 32; 24 saves a byte per trained parameter)",
    )


def _add_rates(parser: argparse.ArgumentParser) -> None:
    """Add the options for how fast optimizer, disk and network are."""
    parser.add_argument(
        "--optimizer-rate",
        type=_positive,
        default=_PARAMETERS_PER_S / 1e9,
        metavar="G",
        help=f"billions of parameters that the optimizer updates per second (default {_PARAMETERS_PER_S / 1e9:g}; in "
        "training, a machine reaches about two thirds of what `roundpipe doctor` measures)",
    )
    parser.add_argument(
        "--state-on-disk",
        type=_positive,
        nargs="?",
        const=_DISK_GBYTES,
        metavar="G",
        help="the optimizer's state is in files on a disk that reads and writes G GB/s in turn (default "
        f"{_DISK_GBYTES:g}; `roundpipe doctor --disk DIR` measures it)",
    )
    parser.add_argument("--machines", type=_count, default=1, metavar="N", help="number of such machines (default 1)")
    parser.add_argument(
        "--network", type=_positive, default=_NETWORK_GBITS, metavar="G", help="Gb/s between them (default 25)"
    )


def _count(text: str, most: int = 10_000_000) -> int:
    if not text.isdecimal() or not 1 <= int(text[:12]) <= most:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is not a whole number from 1 to {most:,}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _optimizer_named(options: argparse.Namespace) -> PaperOptimizer:
    name, moments = options.optimizer, options.moments
    shown, rule, group = _OPTIMIZERS[name]
    if moments != "float32" and not rule.can_be_low:
        raise ConfigError(f"--moments {moments} is for adam and lion; --optimizer {name} has float32 state only.")
    return PaperOptimizer(shown, len(rule.state_names(group)), moments, is_on_disk=options.state_on_disk is not None)


def _machine(options: argparse.Namespace) -> Machine:
    if options.devices is not None:
        gpu, num_devices = parse_gpus(options.devices)
    else:
        num_devices = device_count()
        if not num_devices:
            raise ConfigError("there is no GPU on this machine; say for which ones to estimate, e.g. --devices 1x24GB.")
        facts = gpu_facts(0)
        gpu = gpu_named(facts.name, facts.memory_bytes)
    ram_bytes = available_host_bytes() if options.ram is None else parse_ram(options.ram)
    network = Network(options.machines, options.network * 1e9 / 8) if options.machines > 1 else None
    disk = None if options.state_on_disk is None else options.state_on_disk * 1e9
    return Machine(gpu, num_devices, ram_bytes, options.optimizer_rate * 1e9, network, disk)


def load_on_paper(
    model: str, dtype: torch.dtype, lora_rank: int | None, frozen_weights: str | None = None
) -> PaperModel:
    """The model of a folder, a config file or a shape's name, without weights.

    frozen_weights: the form in which what does not train is packed.
    """
    is_shape = model.lower() in SHAPES and not Path(model).exists()
    is_hub_name = model.count("/") == 1 and not model.startswith((".", "/"))
    if not (is_shape or Path(model).exists() or is_hub_name):
        raise ConfigError(
            f"there is no folder or file {model}, and no such shape; the shapes are: {', '.join(SHAPES)}. A name on "
            "the hub has its owner before a slash, such as Qwen/Qwen3-8B."
        )
    if Path(model, "adapter_config.json").exists():
        raise ConfigError(f"{model} is an adapter of PEFT, not a model; give its model, and --lora R for an adapter.")
    with _without_warnings():
        from transformers import AutoConfig

        try:
            if is_shape:
                fields = dict(SHAPES[model.lower()])
                config = AutoConfig.for_model(fields.pop("model_type"), **fields)
            else:
                config = AutoConfig.from_pretrained(model)
            network = _network(config, dtype)
        except Exception as error:  # transformers and its models raise many kinds of errors for a configuration
            nowhere = "" if is_shape or Path(model).exists() else "there is no such folder or file, and from the hub: "
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"cannot make a model of {model}: {nowhere}{reason}") from error
    has_weights = Path(model).is_dir() and any(Path(model).glob("*.safetensors"))
    comes_packed = has_weights and quantised_as(config, model) is not None
    taken = quantised_parameters(network, Path(model)) if comes_packed else {}
    if lora_rank is not None:
        add_adapters(network, lora_rank)
    pack_on_paper(network, taken)
    form = checked_form(frozen_weights)
    if form is not None:
        pack_frozen(network, form)
    return causal_lm_on_paper(network)


def _network(config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration on the meta device, with the attention that transformers would load it with."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_text = type(config) in AutoModelForCausalLM._model_mapping
    sees_images = type(config) in AutoModelForImageTextToText._model_mapping
    classes: Any = AutoModelForImageTextToText if sees_images and not is_text else AutoModelForCausalLM
    with torch.device("meta"):
        return classes.from_config(config, dtype=dtype)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    import logging

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# The report.


def as_text(model: str, paper: PaperModel, work: Work, machine: Machine, found: Estimate) -> str:
    """The report for people."""
    total = num_elements(paper.model)
    trained = sum(param.numel() for param in paper.model.parameters() if param.requires_grad)
    kind = "exact" if work.is_exact else "stale"
    limit = machine.plan_bytes
    host_bytes = sum(found.host.values())
    host_rows = _visible(found.host) | {"needed in all": host_bytes}
    if machine.ram_bytes is not None:
        host_rows |= {"available": machine.ram_bytes, "left": machine.ram_bytes - host_bytes}
    lines = [
        f"model      {model}: {len(paper.blocks)} blocks, {_amount(total)} parameters, {_amount(trained)} trained",
        *(f"{_INDENT}{remark}" for remark in _remarks(paper, work)),
        f"step       {_counted(work.batch, 'sequence')} of {work.length} tokens, {kind} steps, "
        f"{_counted(found.num_microbatch, 'microbatch', 'es')}{' (chosen)' if work.num_microbatch is None else ''}",
        f"machine    {_in_words(machine)}",
        "",
        "host memory" if machine.network is None else "host memory of each machine",
        memory_table(host_rows),
        "",
        "memory of each device, at its peak",
        memory_table(_visible(found.device) | {"in all": found.device_bytes, "plans may use": limit}),
        "",
        f"plan       {_plan_in_words(found)}",
        f"time       {found.step_s:.3g} s a step, {_tokens_per_s(work, machine, found):,.0f} tokens/s",
        f"{_INDENT}compute {found.compute_s:.3g} s, link {found.link_s:.3g} s, optimizer {found.optimizer_s:.3g} s: "
        f"bound by {found.bound.value}",
        *_network_in_words(machine, found),
        *_disk_in_words(machine, found),
        "",
        _verdict(found, work, machine, is_full=trained == total),
    ]
    return "\n".join(lines) + "\n"


def _remarks(paper: PaperModel, work: Work) -> list[str]:
    """What the user should know about the estimate of this model."""
    config: Any = paper.model.config
    found = []
    if paper.unseen:
        count = sum(param.numel() for param in paper.unseen)
        found.append(f"without images: of the {_amount(count)} parameters that see them, only the memory is estimated")
    attention = config.get_text_config()._attn_implementation
    if attention == "eager":
        found.append("eager attention, because transformers has no other for this model: it keeps all scores")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and work.length > positions:
        found.append(f"--seq-len {work.length} is longer than the {positions} positions of the model")
    return found


def _tokens_per_s(work: Work, machine: Machine, found: Estimate) -> float:
    return machine.num_machines * work.batch * work.length / found.step_s


def _network_in_words(machine: Machine, found: Estimate) -> list[str]:
    if machine.network is None:
        return []
    return [
        f"network    {found.network_bytes / 1e9:.3g} GB out and in per machine and step, {found.network_s:.3g} s at "
        f"{machine.network.bytes_per_s * 8 / 1e9:g} Gb/s,",
        f"{_INDENT}of which {found.exposed_s:.3g} s are not hidden",
    ]


def _disk_in_words(machine: Machine, found: Estimate) -> list[str]:
    if machine.disk_bytes_per_s is None:
        return []
    each = "" if machine.network is None else " per machine"
    return [
        f"disk       {found.state_bytes / 1e9:.3g} GB of optimizer state{each}, read and written in each step: "
        f"{found.disk_s:.3g} s at {machine.disk_bytes_per_s / 1e9:g} GB/s",
    ]


def _visible(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size >= _SMALLEST_ROW}


def _amount(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _in_words(machine: Machine) -> str:
    gpu: DeviceFigures = machine.gpu
    several = "" if machine.network is None else f"{machine.num_machines} machines, each "
    return (
        f"{several}{machine.num_devices} x {gpu.memory_bytes / 1e9:.1f} GB, figures of {gpu.name}\n"
        f"{_INDENT}{gpu.half_flops / 1e12:.0f} TFLOP/s, memory {gpu.memory_bytes_per_s / 1e9:,.0f} GB/s, link "
        f"{gpu.link_bytes_per_s / 1e9:.0f} GB/s, optimizer {machine.parameters_per_s / 1e9:.3g} G parameters/s"
    )


def _plan_in_words(found: Estimate) -> str:
    counts = {kind: sum(task.kind is kind for task in found.forecast.tasks) for kind in TaskKind}
    fused = next(task for task in found.forecast.tasks if task.kind is TaskKind.FUSED).layers
    text = (
        f"{_counted(len(found.forecast.tasks), 'stage')}: {counts[TaskKind.FORWARD]} forward, layers {fused.start} to "
        f"{fused.stop - 1} fused, {counts[TaskKind.BACKWARD]} backward with recomputation"
    )
    tail, wave = found.forecast.overlap.tail, found.forecast.overlap.wave
    if wave.num_layers:
        text += (
            f"\n{_INDENT}the first {wave.num_layers} of these layers run forward for {wave.num_microbatch} microbatches"
        )
    return f"{text}\n{_INDENT}the last {tail} microbatches run backward layer by layer" if tail > 1 else text


def _verdict(found: Estimate, work: Work, machine: Machine, *, is_full: bool) -> str:
    """Whether the step fits, and by how much. The tables above the verdict have the parts."""
    reserved, limit = found.forecast.peak_bytes, machine.plan_bytes
    lora = "--lora R, " if is_full else ""
    if found.refusal is not None and machine.ram_bytes is not None:
        return _host_verdict(found, machine.ram_bytes, lora, is_on_disk=work.optimizer.is_on_disk)
    if not found.forecast.fits:
        more = "more microbatches, " if found.num_microbatch < work.batch else ""
        return (
            f"DOES NOT FIT into device memory: with one layer per stage the plan reserves {reserved / 1e9:.1f} GB, "
            f"{(reserved - limit) / 1e9:.1f} GB more than plans may use. Use shorter sequences, {more}{lora}or a GPU "
            "with more memory."
        )
    verdict = f"fits: the plan reserves {reserved / 1e9:.1f} of the {limit / 1e9:.1f} GB that plans may use on a device"
    if machine.ram_bytes is None:
        return verdict
    return f"{verdict},\n{(machine.ram_bytes - sum(found.host.values())) / 1e9:.1f} GB of host memory are left"


def _host_verdict(found: Estimate, ram_bytes: int, lora: str, *, is_on_disk: bool) -> str:
    """The verdict for too little host memory, with advice in options of this command; `refusal` has wrapping's."""
    needed, inputs = sum(found.host.values()), found.host.get(SAVED_INPUTS, 0)
    if needed - inputs <= ram_bytes:
        return f"DOES NOT FIT: {found.refusal}"
    disk = "" if is_on_disk else "--state-on-disk, "
    return (
        f"DOES NOT FIT into host memory: {(needed - ram_bytes) / 1e9:.1f} GB are missing. Use {lora}{disk}a smaller "
        "model, or a machine with more memory."
    )


def as_json(model: str, paper: PaperModel, work: Work, machine: Machine, found: Estimate) -> str:
    """The report for programs. Sizes are in bytes, times in seconds."""
    plan = found.forecast.plan
    content = {
        "model": model,
        "parameters": num_elements(paper.model),
        "trained": sum(p.numel() for p in paper.model.parameters() if p.requires_grad),
        "remarks": _remarks(paper, work),
        "work": {"batch": work.batch, "seq_len": work.length, "exact": work.is_exact, "optimizer": work.optimizer.name},
        "machine": dataclasses.asdict(machine),
        "microbatches": found.num_microbatch,
        "host_bytes": dict(found.host),
        "device_bytes": dict(found.device),
        "device_reserved_bytes": found.forecast.peak_bytes,
        "device_limit_bytes": machine.plan_bytes,
        "plan": {name: [[r.start, r.stop] for r in getattr(plan, name)] for name in ("fwd_plan", "bwd_plan")},
        "tail": found.forecast.overlap.tail,
        "wave": [found.forecast.overlap.wave.num_microbatch, found.forecast.overlap.wave.num_layers],
        "seconds": {
            "step": found.step_s,
            "compute": found.compute_s,
            "link": found.link_s,
            "optimizer": found.optimizer_s,
            "network": found.network_s,
            "disk": found.disk_s,
            "network_not_hidden": found.exposed_s,
        },
        "network_bytes": found.network_bytes,
        "disk_bytes": found.state_bytes if work.optimizer.is_on_disk else 0,
        "tokens_per_s": _tokens_per_s(work, machine, found),
        "bound": found.bound.value,
        "fits": found.fits,
        "refusal": found.refusal,
    }
    return json.dumps(content, indent=2) + "\n"
