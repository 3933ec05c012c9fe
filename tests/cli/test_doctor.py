"""`roundpipe doctor`: what it reports of this machine, each finding from its cause, JSON, text and exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import host_facts
from roundpipe.__main__ import main
from roundpipe.cli import disk_rates, doctor, instruction_sets, machine
from roundpipe.cli.disk_rates import DiskRates
from roundpipe.cli.doctor import Finding, Severity, findings
from roundpipe.cli.machine import Cores, Gpu, Machine, Memory, Optimizer, Products, examine
from roundpipe.devices import Device, GpuFacts, HostPinner
from roundpipe.devices.virtual import NoPinner, VirtualDevice
from roundpipe.optim.native import kernel, library
from roundpipe.store import HalvedMaster

GIB = 1 << 30
SOUND_GPU = Gpu("cuda:0", GpuFacts("H200", "9.0", 150 * GIB, 149 * GIB, 1), True, 50e9, 49e9)
SOUND = Machine(
    versions={
        "roundpipe": "0.1.0", "python": "3.12.1", "system": "Linux", "torch": "2.13.0+cu130", "cuda": "13.0",
        "driver": "580.65.06", "transformers": None,
    },
    gpus=(SOUND_GPU,),
    cuda_error=None,
    default_devices=("cuda:0",),
    default_devices_error=None,
    memory=Memory(512 * GIB, 500 * GIB, 8 << 20, "madvise"),
    cores=Cores(8, tuple(range(8)), None, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}),
    optimizer=Optimizer("/usr/bin/cc", "built with the package", "AVX-512", 6, 4e9),
    products=Products(None, True),
    folder="/runs",
    disk_free_bytes=10**12,
    disk=DiskRates("xfs", 3e9, 1.5e9, True),
)  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Machine:
    """This machine, examined in earnest."""
    return examine()


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def sound_but(**changes: Any) -> Finding:
    """The one finding of a sound machine after these changes."""
    return only(findings(dataclasses.replace(SOUND, **changes)))


# What is reported of this machine.


def test_versions(here: Machine) -> None:
    assert here.versions["roundpipe"] == roundpipe.__version__
    assert here.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert here.versions["torch"] == torch.__version__
    assert here.versions["liger-kernel"] is None or here.versions["liger-kernel"]


def test_host(here: Machine) -> None:
    assert here.memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here.memory.available_bytes is not None
    assert 0 < here.memory.available_bytes <= here.memory.total_bytes
    assert here.cores.present == os.cpu_count()
    assert set(here.cores.usable) == os.sched_getaffinity(0)
    assert here.folder == os.getcwd()
    assert here.disk_free_bytes > 0


def test_optimizer(here: Machine) -> None:
    found = kernel.one_pass_kernel()
    assert found is not None
    assert here.optimizer.threads == found.num_threads
    assert here.optimizer.instruction_set in ("portable", "AVX2", "AVX-512")
    assert here.optimizer.parameters_per_s is not None
    assert here.optimizer.parameters_per_s > 0
    assert here.optimizer.error is None
    beside_the_source = (library.SOURCE.parent / library.built_name()).exists()
    assert here.optimizer.origin == ("built with the package" if beside_the_source else "compiled at first use")


def test_the_rate_is_that_of_the_kernel_in_training(updates: list[kernel.KernelParameter]) -> None:
    """Halved masters, and updates that change the weights."""
    found = kernel.one_pass_kernel()
    assert found is not None
    assert machine.optimizer_rate(found, count=1000) > 0
    assert len(updates) == 5
    assert isinstance(updates[0].master, HalvedMaster)
    assert updates[0].weight is not None
    assert (updates[0].weight < 0).all()


def test_products_on_this_machine_work_or_have_a_level(here: Machine) -> None:
    assert here.products.work is True or here.products.level_needed in instruction_sets.LEVELS


# GPUs, on virtual devices in their place.


class Pinner(HostPinner):
    def __init__(self, works: bool) -> None:
        self.works, self.pinned = works, 0

    def pin(self, address: int, num_bytes: int) -> bool:
        self.pinned += self.works
        return self.works

    def unpin(self, address: int) -> None:
        self.pinned -= 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    """Examines a GPU whose device and pinner are given."""

    def examined(device: Device, pinner: HostPinner) -> Gpu:
        monkeypatch.setattr(machine, "_LINK_BYTES", 1 << 12)
        monkeypatch.setattr(machine, "gpu_facts", lambda index: SOUND_GPU.facts)
        monkeypatch.setattr(machine, "open_devices", lambda specs: [device])
        monkeypatch.setattr(machine, "host_pinner", lambda specs: pinner)
        return machine._examined_gpu(0)

    return examined


@pytest.mark.parametrize("works", [True, False])
def test_the_link_is_measured_both_ways_and_memory_unpinned(gpu: Callable[..., Gpu], works: bool) -> None:
    pinner = Pinner(works)
    found = gpu(VirtualDevice(0), pinner)
    assert found.upload_bytes_per_s is not None
    assert found.download_bytes_per_s is not None
    assert min(found.upload_bytes_per_s, found.download_bytes_per_s) > 0
    assert (found.can_pin, found.error, pinner.pinned) == (works, None, 0)


def test_copies_of_the_measurement_go_up_and_down() -> None:
    device, host = VirtualDevice(0), torch.arange(100, dtype=torch.uint8)
    machine.link_rates(device, host)
    assert torch.equal(host, torch.arange(100, dtype=torch.uint8)), "what went up came down again"


def test_a_gpu_that_does_not_compute(gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    def check_products(device: Device) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors")

    monkeypatch.setattr(machine, "check_products", check_products)
    found = gpu(VirtualDevice(0), NoPinner())
    assert found.error == "CUDA error: no kernel image is available for execution on the device"
    finding = sound_but(gpus=(found,))
    assert (finding.severity, finding.what, finding.value) == (Severity.FAILS, "cuda:0 does not work", found.error)


def test_a_product_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.check_products(VirtualDevice(0))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda self, other: self)
    with pytest.raises(RuntimeError, match=r"1\.0 instead of 128"):
        machine.check_products(VirtualDevice(0))


# Findings, each from its cause.


def test_a_sound_machine_has_no_finding() -> None:
    assert findings(SOUND) == []


def test_an_old_torch() -> None:
    finding = sound_but(versions={**SOUND.versions, "torch": "2.5.1"})
    assert (finding.severity, finding.value) == (Severity.FAILS, "2.5.1")
    assert "2.6" in finding.advice


def test_devices_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "gpu:7")
    devices, error = machine._default_devices()
    assert devices == ()
    finding = sound_but(default_devices=devices, default_devices_error=error)
    assert finding.severity is Severity.FAILS
    assert "gpu:7" in finding.value
    assert "ROUNDPIPE_DEVICES" in finding.advice


def test_no_gpu() -> None:
    finding = sound_but(gpus=(), versions={**SOUND.versions, "driver": None})
    assert (finding.severity, finding.what) == (Severity.SLOW, "there is no GPU")


@pytest.mark.parametrize(("cuda", "advice"), [(None, "build of torch with CUDA"), ("13.0", "nvidia-smi")])
def test_a_driver_but_no_gpu_in_torch(cuda: str | None, advice: str) -> None:
    versions = {**SOUND.versions, "cuda": cuda}
    finding = sound_but(gpus=(), versions=versions, cuda_error="Torch not compiled with CUDA enabled")
    assert (finding.severity, finding.value) == (Severity.FAILS, "Torch not compiled with CUDA enabled")
    assert "580.65.06" in finding.what
    assert advice in finding.advice


def test_memory_that_cannot_be_pinned() -> None:
    finding = sound_but(gpus=(dataclasses.replace(SOUND_GPU, can_pin=False),))
    assert finding.severity is Severity.SLOW
    assert "cuda:0" in finding.what
    assert "8.4 MB" in finding.value
    assert "ulimit -l" in finding.advice


@pytest.mark.parametrize("way", ["upload_bytes_per_s", "download_bytes_per_s"])
def test_a_slow_link(way: str) -> None:
    finding = sound_but(gpus=(SOUND_GPU, dataclasses.replace(SOUND_GPU, device="cuda:1", **{way: 6e9})))
    assert finding.what == "the link of cuda:1 is slow"
    assert "6.0 GB/s" in finding.value


def test_a_process_far_from_its_gpu() -> None:
    finding = sound_but(cores=dataclasses.replace(SOUND.cores, usable=(0, 1, 2, 3)))
    assert finding.what == "no core near cuda:0 may be used"
    assert "--cpunodebind=1" in finding.advice


def test_little_memory() -> None:
    finding = sound_but(memory=dataclasses.replace(SOUND.memory, available_bytes=4 * 10**9))
    assert (finding.what, finding.value) == ("little host memory is available", "4.0 GB of 549.8 GB")


def test_huge_pages_that_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(host_facts, "HUGE_PAGES", tmp_path / "enabled")
    finding = sound_but(memory=dataclasses.replace(SOUND.memory, huge_pages=host_facts.huge_pages()))
    assert finding.what == "transparent huge pages are off"
    assert "echo madvise >" in finding.advice


def test_little_disk() -> None:
    finding = sound_but(disk_free_bytes=3 * 10**9)
    assert finding.value == "3.0 GB in /runs"


@pytest.mark.parametrize(
    ("disk", "severity", "what"),
    [
        (DiskRates("ext4", 9e8, 4e9, True), Severity.SLOW, "the disk is slow"),
        (DiskRates("tmpfs", 9e9, 9e9, True), Severity.SLOW, "the folder's files lie in host memory"),
        (DiskRates("nfs", error="Permission denied"), Severity.FAILS, "the folder cannot be measured"),
    ],
)
def test_a_disk_is_judged_if_the_user_names_it(disk: DiskRates, severity: Severity, what: str) -> None:
    finding = sound_but(disk=disk, is_for_training=True)
    assert (finding.severity, finding.what) == (severity, what)
    assert not findings(dataclasses.replace(SOUND, disk=disk)), "the current folder need not be a place for state"


@pytest.mark.parametrize("has_direct_access", [True, False])
def test_rates_come_from_the_disk_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_direct_access: bool
) -> None:
    """Either all access is direct, or each write waits for the disk and pages are dropped before they are read."""
    events: list[str] = []
    monkeypatch.setattr(disk_rates, "_MOST_CHUNKS", 16)
    if not has_direct_access:
        monkeypatch.setattr(disk_rates, "_is_made_direct", lambda handle: False)
    for name in ("pwrite", "fdatasync", "posix_fadvise", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, n=name, r=real: [events.append(n), r(*args)][1])
    found = disk_rates.measured_rates(tmp_path)
    assert found.error is None
    assert found.read_bytes_per_s is not None
    assert found.write_bytes_per_s is not None
    assert found.both_bytes_per_s == pytest.approx(
        2 * found.read_bytes_per_s * found.write_bytes_per_s / (found.read_bytes_per_s + found.write_bytes_per_s)
    )
    assert not list(tmp_path.iterdir())
    assert events.count("pwrite") == events.count("preadv") == 16
    if found.is_direct:
        assert "posix_fadvise" not in events
    else:
        assert events.count("fdatasync") == 17, "after each write, and at the end"
        assert events.index("posix_fadvise") == 16 + 17
    assert found.is_direct or not has_direct_access or found.file_system not in ("ext4", "xfs")


def test_a_slow_disk_is_measured_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rates, "_LIMIT_S", 0.1)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: [time.sleep(0.2), real(*args)][1])
    found = disk_rates.measured_rates(tmp_path)
    assert found.write_bytes_per_s is not None
    assert found.write_bytes_per_s <= 4 * disk_rates._CHUNK_BYTES / 0.2, "one chunk of each thread"


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left" in str(disk_rates.measured_rates(tmp_path).error)
    monkeypatch.setattr(disk_rates.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    assert disk_rates.measured_rates(tmp_path).error == "too little space is free"


@pytest.mark.parametrize(
    "files",
    [{"cpu.max": "250000 100000\n"}, {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}],
)
def test_a_limit_of_processor_time(files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_facts, "_CGROUP", tmp_path)
    finding = sound_but(cores=dataclasses.replace(SOUND.cores, quota=host_facts.core_quota()))
    assert finding.value == "2.5 cores for 6 threads of the optimizer"
    assert finding.advice.endswith("ROUNDPIPE_OPTIMIZER_THREADS=2.")


@pytest.mark.parametrize("text", ["max 100000\n", "", "nonsense\n"])
def test_no_limit_of_processor_time(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host_facts, "_CGROUP", tmp_path)
    assert host_facts.core_quota() is None


def test_numa_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, cores in {10: "", 0: "0-2,8\n", 1: "3,5-6\n"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    monkeypatch.setattr(host_facts, "_NODES", tmp_path)
    assert list(host_facts.numa_nodes().items()) == [(0, (0, 1, 2, 8)), (1, (3, 5, 6)), (10, ())]


def survives(*levels: str | None) -> instruction_sets.Probe:
    """The probe of a processor on which products crash unless one of the levels is set."""
    return lambda level: 0 if level in levels else -4


@pytest.mark.parametrize(
    ("level_set", "working", "products", "advice"),
    [
        (None, (None,), Products(None, True), None),
        (None, ("AVX2",), Products(None, False, "AVX2"), "Set ONEDNN_MAX_CPU_ISA=AVX2 "),
        ("AVX2", ("AVX2",), Products("AVX2", True), None),
        ("AVX512_CORE", ("AVX2",), Products("AVX512_CORE", False, "AVX2"), "Set ONEDNN_MAX_CPU_ISA=AVX2 "),
        ("AVX9", (None,), Products("AVX9", False), "unset ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA"),
        (None, (), Products(None, False, always_crash=True), "install another build of torch"),
        ("AVX2", (), Products("AVX2", False, always_crash=True), "install another build of torch"),
    ],
)
def test_products_that_crash(
    level_set: str | None,
    working: tuple[str | None, ...],
    products: Products,
    advice: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in instruction_sets.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if level_set is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level_set)
    assert machine._examined_products(survives(*working)) == products
    found = findings(dataclasses.replace(SOUND, products=products))
    if advice is None:
        assert found == []
    else:
        assert only(found).severity is Severity.FAILS
        assert advice in only(found).advice


def test_a_trial_of_products_that_does_not_end_is_no_finding() -> None:
    products = machine._examined_products(lambda level: None)
    assert products.work is None
    assert findings(dataclasses.replace(SOUND, products=products)) == []


def test_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The warning of the library becomes the value of the finding, and is not written beside it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "_built_with_the_package", lambda: iter(()))
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    monkeypatch.setattr(machine, "one_pass_kernel", lambda: kernel._kernel_of.__wrapped__(0))
    optimizer = machine._examined_optimizer()
    assert optimizer.compiler is None
    assert optimizer.origin is None
    finding = sound_but(optimizer=optimizer)
    assert finding.severity is Severity.SLOW
    assert "there is no C compiler" in finding.value
    assert "C compiler (gcc or clang)" in finding.advice
    assert capfd.readouterr().err == ""


def test_a_wrong_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_OPTIMIZER_THREADS", "many")
    monkeypatch.setattr(machine, "one_pass_kernel", lambda: kernel._kernel_of.__wrapped__(0))
    finding = sound_but(optimizer=machine._examined_optimizer())
    assert finding.severity is Severity.FAILS
    assert "'many' is not a number of threads" in finding.value


def test_a_slow_optimizer() -> None:
    finding = sound_but(optimizer=dataclasses.replace(SOUND.optimizer, parameters_per_s=2e8))
    assert finding.value == "0.20 billion parameters/s with 6 threads"


def test_the_worst_finding_comes_first() -> None:
    found = findings(dataclasses.replace(SOUND, disk_free_bytes=0, products=Products(None, False, "AVX2")))
    assert [finding.severity for finding in found] == [Severity.FAILS, Severity.SLOW]


# The command.

FAILING = dataclasses.replace(SOUND, products=Products(None, False, "AVX2"))
SLOW = dataclasses.replace(SOUND, disk_free_bytes=0)


@pytest.mark.parametrize(("examined", "code"), [(SOUND, 0), (SLOW, 0), (FAILING, 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_exit_code_says_whether_everything_works(
    examined: Machine, code: int, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda disk: examined)
    assert main(["doctor", *options]) == code


def test_json_is_one_object_with_every_field(
    here: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda disk: here)
    main(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    fields = {field.name for field in dataclasses.fields(Machine)}
    assert set(printed) == fields | {"findings", "works", "seconds"}
    assert printed["versions"] == here.versions
    assert printed["memory"] == dataclasses.asdict(here.memory)
    assert printed["optimizer"] == dataclasses.asdict(here.optimizer)
    for finding in printed["findings"]:
        assert set(finding) == {"severity", "what", "value", "advice"}
        assert all(finding.values())


def test_the_text_names_facts_and_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda disk: FAILING)
    main(["doctor"])
    text = capsys.readouterr().out
    for part in (
        "H200, capability 9.0, 161.1 GB (160.0 GB free), NUMA node 1",
        "50.0 GB/s up, 49.0 GB/s down\n",
        "536.9 GB available of 549.8 GB",
        "full training of 38.3 billion parameters",
        "8 usable of 8",
        "node 0: 4 cores, node 1: 4 cores",
        "built with the package, AVX-512, 6 threads, 4.00 billion parameters/s",
        "13.0, driver 580.65.06",
        "1000.0 GB free in /runs (xfs)\n",
        "3.0 GB/s read, 1.5 GB/s written\n",
        "0.125 billion parameters/s (Adam), 0.500 with 8-bit moments; in memory 4.00\n",
        "roundpipe estimate --state-on-disk 2 --weights-on-disk 3\n",
        "at most 1.50 billion bfloat16 weights/s are read, 5.65 in nf4\n",
        "FAILS: half-precision products on the CPU crash: ONEDNN_MAX_CPU_ISA is not set\n  Set ",
        "\n1 will not work, 0 will be slow\n",
    ):
        assert part in text


def test_the_text_of_a_sound_machine_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda disk: SOUND)
    main(["doctor"])
    assert capsys.readouterr().out.endswith("\neverything is well\n")


def test_a_disk_that_is_no_folder_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(tmp_path / "nowhere")]) == 2
    assert "--disk: there is no folder" in capsys.readouterr().err


def test_wrong_options_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err
    assert main(["doctor", "--help"]) == 0
    assert "--json" in capsys.readouterr().out
