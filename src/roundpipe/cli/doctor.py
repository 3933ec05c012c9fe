"""The command `roundpipe doctor`: says what the machine has, what will not work or be slow, and what to do.

`findings` judges what cli.machine has found, and touches nothing. Knows no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from roundpipe.cli import instruction_sets
from roundpipe.cli.machine import Gpu, Machine, Optimizer, examine
from roundpipe.host_facts import HUGE_PAGES, MEMORY_FILE_SYSTEMS
from roundpipe.store.training_memory import assumed_optimizer

OLDEST_TORCH = (2, 6)
# In host memory, exact steps: bfloat16 weights, gradients and low halves of masters, and float32 states.
_BYTES_PER_PARAMETER = 3 * 2 + 4 * assumed_optimizer().num_states
# Limits below which a finding is reported.
_SLOW_LINK = 10e9  # bytes/s; PCIe 3.0 with 16 lanes makes about 12e9
_SLOW_OPTIMIZER = 0.5e9  # parameters/s; one core of a server makes 0.6e9
_LITTLE_MEMORY = 8e9  # bytes
_LITTLE_DISK = 20e9  # bytes
_SLOW_DISK = 1e9  # bytes/s; an NVMe drive makes 2e9 and more, a SATA drive 0.5e9
_PACKED_BYTES = 17 / 32  # of a weight in nf4: 4 bits, and a scale of 2 bytes for 64 weights
_DONE, _FAILED = 0, 1


# What will not work or be slow.


class Severity(enum.Enum):
    """How bad a finding is."""

    FAILS = "fails"
    SLOW = "slow"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that will not work or be slow: what, its value, and what to do."""

    severity: Severity
    what: str
    value: str
    advice: str


def findings(machine: Machine) -> list[Finding]:
    """Everything about a machine that deserves attention, the worst first."""
    found = [finding for judge in _JUDGES for finding in judge(machine)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.FAILS)


def _judge_versions(machine: Machine) -> Iterator[Finding]:
    release = machine.versions["torch"] or ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield Finding(
            Severity.FAILS, "torch is too old", release, f"Install torch {needed} or newer: pip install -U torch"
        )
    if machine.default_devices_error is not None:
        advice = "Correct or unset the environment variable ROUNDPIPE_DEVICES."
        yield Finding(Severity.FAILS, "the default devices cannot be used", machine.default_devices_error, advice)


def _judge_gpus(machine: Machine) -> Iterator[Finding]:
    driver = machine.versions["driver"]
    if machine.cuda_error is not None:
        if machine.versions["cuda"] is None:
            advice = "Install a build of torch with CUDA that this driver supports; see pytorch.org/get-started."
        else:
            advice = "Check CUDA_VISIBLE_DEVICES, nvidia-smi, and that the driver is new enough for the CUDA of torch."
        yield Finding(Severity.FAILS, f"torch cannot use the GPUs of driver {driver}", machine.cuda_error, advice)
    elif not machine.gpus:
        yield Finding(
            Severity.SLOW,
            "there is no GPU",
            "models run on virtual devices on the CPU",
            "Use it for tests and trials; training needs an NVIDIA GPU and its driver.",
        )
    for gpu in machine.gpus:
        yield from _judge_gpu(gpu, machine)


def _judge_gpu(gpu: Gpu, machine: Machine) -> Iterator[Finding]:
    if gpu.error is not None:
        advice = (
            "Look at the GPU with nvidia-smi. If torch has no code for this GPU, install a build of torch that has."
        )
        yield Finding(Severity.FAILS, f"{gpu.device} does not work", gpu.error, advice)
        return
    if gpu.can_pin is False:
        limit = _size(machine.memory.lock_limit_bytes, "unlimited")
        yield Finding(
            Severity.SLOW,
            f"host memory cannot be pinned for {gpu.device}",
            f"the limit of locked memory is {limit}",
            "Raise the limit (ulimit -l unlimited; docker run --ulimit memlock=-1): pinned memory is copied faster.",
        )
    rates = (gpu.upload_bytes_per_s, gpu.download_bytes_per_s)
    if any(rate is not None and rate < _SLOW_LINK for rate in rates):
        yield Finding(
            Severity.SLOW,
            f"the link of {gpu.device} is slow",
            f"{_rate(rates[0])} up, {_rate(rates[1])} down",
            "Check PCIe generation and lanes (nvidia-smi -q) and other load. Larger batches copy less per token.",
        )
    node = None if gpu.facts is None else gpu.facts.numa_node
    near = machine.cores.numa_nodes.get(node, ()) if node is not None else ()
    if near and not set(near) & set(machine.cores.usable):
        yield Finding(
            Severity.SLOW,
            f"no core near {gpu.device} may be used",
            f"the GPU is at NUMA node {node}, the process runs on other nodes",
            f"Start it on that node: numactl --cpunodebind={node}",
        )


def _judge_memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    if memory.available_bytes is not None and memory.available_bytes < _LITTLE_MEMORY:
        yield Finding(
            Severity.SLOW,
            "little host memory is available",
            f"{_size(memory.available_bytes)} of {_size(memory.total_bytes)}",
            "Weights, gradients and optimizer state live in it. End other processes, or raise the container's limit.",
        )
    if memory.huge_pages == "never":
        yield Finding(
            Severity.SLOW,
            "transparent huge pages are off",
            memory.huge_pages,
            f"As root: echo madvise > {HUGE_PAGES}. The optimizer then passes over its memory with fewer TLB misses.",
        )
    if machine.disk_free_bytes < _LITTLE_DISK:
        yield Finding(
            Severity.SLOW,
            "little disk space is free",
            f"{_size(machine.disk_free_bytes)} in {machine.folder}",
            "Write checkpoints elsewhere: with optimizer state they take more than 10 bytes per trained parameter.",
        )
    if machine.is_for_training:
        yield from _judge_disk(machine)


def _judge_disk(machine: Machine) -> Iterator[Finding]:
    disk = machine.disk
    rates = (disk.read_bytes_per_s, disk.write_bytes_per_s)
    if disk.file_system in MEMORY_FILE_SYSTEMS:
        yield Finding(
            Severity.SLOW,
            "the folder's files lie in host memory",
            f"{machine.folder} is a {disk.file_system}",
            "State and weights in it save no memory. Name a folder on a disk.",
        )
    elif disk.error is not None:
        advice = "Name a folder in which you may write, with free space."
        yield Finding(Severity.FAILS, "the folder cannot be measured", f"{machine.folder}: {disk.error}", advice)
    elif any(rate is not None and rate < _SLOW_DISK for rate in rates):
        yield Finding(
            Severity.SLOW,
            "the disk is slow",
            f"{_rate(rates[0])} read, {_rate(rates[1])} written in {machine.folder}",
            "Keep state and weights on a local NVMe drive, or in memory in fewer bits (--moments 8bit).",
        )


def _judge_processor(machine: Machine) -> Iterator[Finding]:
    cores, threads = machine.cores, machine.optimizer.threads
    if cores.quota is not None and cores.quota < (threads or len(cores.usable)):
        yield Finding(
            Severity.SLOW,
            "the control group limits the processor time",
            f"{cores.quota:g} cores for {threads or len(cores.usable)} threads of the optimizer",
            f"Raise the limit, or set ROUNDPIPE_OPTIMIZER_THREADS={max(int(cores.quota), 1)}.",
        )
    products = machine.products
    if products.work is False:
        variable = instruction_sets.VARIABLE
        if products.always_crash:
            advice = f"They crash at every level of {variable}: install another build of torch."
        elif products.level_needed is None:
            advice = f"They work without a level: unset {' and '.join(instruction_sets.VARIABLES)}."
        else:
            advice = f"Set {variable}={products.level_needed} in the environment before Python starts."
        yield Finding(
            Severity.FAILS,
            "half-precision products on the CPU crash",
            f"{variable} is {products.level_set or 'not set'}",
            advice,
        )


def _judge_optimizer(machine: Machine) -> Iterator[Finding]:
    optimizer = machine.optimizer
    if optimizer.setting_error is not None:
        advice = "Correct or unset the environment variable."
        yield Finding(Severity.FAILS, "optimizers cannot be made", optimizer.setting_error, advice)
    if optimizer.error is not None:
        advice = "Install a wheel with the kernel, or a C compiler (gcc or clang). Without it torch's optimizers run."
        yield Finding(Severity.SLOW, "the optimizer's C kernel is not in use", optimizer.error, advice)
    rate = optimizer.parameters_per_s
    if rate is not None and rate < _SLOW_OPTIMIZER:
        yield Finding(
            Severity.SLOW,
            "the optimizer is slow",
            f"{rate / 1e9:.2f} billion parameters/s with {optimizer.threads} threads",
            "Give the process more cores; memory channels limit it, too. LoRA has fewer parameters to update.",
        )


_JUDGES: tuple[Callable[[Machine], Iterable[Finding]], ...] = (
    _judge_versions,
    _judge_gpus,
    _judge_memory,
    _judge_processor,
    _judge_optimizer,
)


# The command.


def run(words: Sequence[str]) -> int:
    """Examine this machine and write the report. Returns 1 if something will not work, else 0."""
    parser = argparse.ArgumentParser(
        prog="roundpipe doctor",
        description="Examine this machine: versions, GPUs and their links, memory, cores, optimizer, disk, and what "
        "will be slow. Exit code 1: something will not work.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--disk", metavar="DIR", help="a folder for state or weights, to measure its disk; default: the current folder"
    )
    options = parser.parse_args(list(words))
    start_s = time.perf_counter()
    machine = examine(options.disk)
    found = findings(machine)
    seconds = time.perf_counter() - start_s
    sys.stdout.write(_as_json(machine, found, seconds) if options.json else as_text(machine, found))
    return _FAILED if any(finding.severity is Severity.FAILS for finding in found) else _DONE


def _as_json(machine: Machine, found: Sequence[Finding], seconds: float) -> str:
    content = dataclasses.asdict(machine) | {
        "findings": [dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in found],
        "works": all(finding.severity is not Severity.FAILS for finding in found),
        "seconds": round(seconds, 2),
    }
    return json.dumps(content, indent=2) + "\n"


def as_text(machine: Machine, found: Sequence[Finding]) -> str:
    """The report for people: what the machine has, then what deserves attention."""
    rows = [*_rows_of_software(machine), *_rows_of_devices(machine), *_rows_of_host(machine)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines.append("")
    for finding in found:
        lines += [f"{finding.severity.value.upper()}: {finding.what}: {finding.value}", f"  {finding.advice}"]
    fails = sum(finding.severity is Severity.FAILS for finding in found)
    slow = len(found) - fails
    lines.append(f"{fails} will not work, {slow} will be slow" if found else "everything is well")
    return "\n".join(lines) + "\n"


def _rows_of_software(machine: Machine) -> Iterator[tuple[str, str]]:
    versions = dict(machine.versions)
    for name in ("roundpipe", "python", "system", "torch"):
        yield name, versions.pop(name) or "unknown"
    yield "CUDA", f"{versions.pop('cuda') or 'none in torch'}, driver {versions.pop('driver') or 'none'}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none"
    yield "  not installed", ", ".join(name for name, version in versions.items() if not version) or "none"


def _rows_of_devices(machine: Machine) -> Iterator[tuple[str, str]]:
    for gpu in machine.gpus:
        if gpu.facts is None:
            yield gpu.device, "does not work"
            continue
        facts = gpu.facts
        node = "" if facts.numa_node is None else f", NUMA node {facts.numa_node}"
        memory = f"{_size(facts.memory_bytes)} ({_size(facts.free_bytes)} free)"
        yield gpu.device, f"{facts.name}, capability {facts.capability}, {memory}{node}"
        pinned = "" if gpu.can_pin else ", memory not pinned"
        yield "  link", f"{_rate(gpu.upload_bytes_per_s)} up, {_rate(gpu.download_bytes_per_s)} down{pinned}"
    yield "used by default", ", ".join(machine.default_devices) or "none"


def _rows_of_host(machine: Machine) -> Iterator[tuple[str, str]]:
    memory, cores, optimizer, products = machine.memory, machine.cores, machine.optimizer, machine.products
    yield "host memory", f"{_size(memory.available_bytes)} available of {_size(memory.total_bytes)}"
    if memory.available_bytes is not None:
        name = assumed_optimizer().name
        billions = memory.available_bytes / _BYTES_PER_PARAMETER / 1e9
        yield "  enough for", f"full training of {billions:.1f} billion parameters (bfloat16, {name}, exact steps)"
    yield "  lock limit", _size(memory.lock_limit_bytes, "unlimited")
    yield "  huge pages", memory.huge_pages or "none"
    quota = "" if cores.quota is None else f", processor time of {cores.quota:g}"
    yield "cores", f"{len(cores.usable)} usable of {cores.present}{quota}"
    nodes = (f"node {node}: {len(members)} cores" for node, members in cores.numa_nodes.items())
    yield "NUMA", ", ".join(nodes) or "not reported"
    yield "C compiler", optimizer.compiler or "none"
    yield "optimizer kernel", _kernel_in_words(optimizer)
    works = {True: "works", False: "crashes", None: "not known: the trial did not end"}[products.work]
    level = "" if products.level_set is None else f" with {instruction_sets.VARIABLE}={products.level_set}"
    yield "bf16 on the CPU", f"{works}{level}"
    kind = "" if machine.disk.file_system is None else f" ({machine.disk.file_system})"
    yield "disk", f"{_size(machine.disk_free_bytes)} free in {machine.folder}{kind}"
    yield from _rows_of_disk(machine)


def _rows_of_disk(machine: Machine) -> Iterator[tuple[str, str]]:
    disk = machine.disk
    if disk.read_bytes_per_s is None or disk.both_bytes_per_s is None:
        yield "  rates", f"not measured{'' if disk.error is None else f': {disk.error}'}"
        return
    yield "  rates", f"{_rate(disk.read_bytes_per_s)} read, {_rate(disk.write_bytes_per_s)} written"
    both, name = disk.both_bytes_per_s, assumed_optimizer().name
    whole, low = (both / 2 / (num_bytes * assumed_optimizer().num_states) / 1e9 for num_bytes in (4, 1))
    kernel = machine.optimizer.parameters_per_s
    alone = "" if kernel is None else f"; in memory {kernel / 1e9:.2f}"
    rates = f"{whole:.3f} billion parameters/s ({name}), {low:.3f} with 8-bit moments"
    yield "  state there", f"a step updates at most {rates}{alone}"
    read = disk.read_bytes_per_s / 1e9
    yield "  for estimates", f"roundpipe estimate --state-on-disk {both / 1e9:.2g} --weights-on-disk {read:.2g}"
    yield (
        "  weights there",
        f"at most {read / 2:.2f} billion bfloat16 weights/s are read, {read / _PACKED_BYTES:.2f} in nf4",
    )


def _kernel_in_words(optimizer: Optimizer) -> str:
    if optimizer.parameters_per_s is None:
        return "none"
    rate = f"{optimizer.parameters_per_s / 1e9:.2f} billion parameters/s"
    return f"{optimizer.origin}, {optimizer.instruction_set}, {optimizer.threads} threads, {rate}"


def _size(num_bytes: int | None, otherwise: str = "unknown") -> str:
    if num_bytes is None:
        return otherwise
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _rate(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f} GB/s"
