"""Estimates a training step of a model without weights: memory of host and devices, plan, seconds, what bounds it.

The plan and the seconds come from the functions that plan running models (`plan.forecast`), the host memory from the
function that refuses a model that does not fit (`store.training_memory`). Only the costs of layers are estimated
(`estimate.layer_costs`) instead of measured.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

import torch

from roundpipe.devices import MEMORY_SHARE
from roundpipe.errors import HostMemoryError
from roundpipe.estimate.figures import DeviceFigures
from roundpipe.estimate.layer_costs import PaperModel, layer_costs
from roundpipe.plan import ModelProfile, TaskKind
from roundpipe.plan.forecast import Forecast, Network, forecast, step_with_exchange_s
from roundpipe.plan.overlap import UpdateTiming
from roundpipe.plan.predict import StageMemory, task_seconds
from roundpipe.store.training_memory import (
    SECOND_WEIGHTS,
    PaperOptimizer,
    PinMode,
    assumed_optimizer,
    require_training_memory,
    training_memory,
)

# Bytes per second of copies from memory that is not pinned, as of mapped files: measured on an H200, whose link is the
# fastest of all figures. The host copies them first.
UNPINNED_BYTES_PER_S = 6.9e9
CUDA_CONTEXT_BYTES = 600_000_000  # device memory of the driver and of libraries, outside torch's allocator
SAVED_INPUTS = "inputs saved for recomputation"
_MOST_MICROBATCHES = 1024  # that are tried. More bring nothing, and the time of the forecast grows with them
_TIE = 0.02  # steps that differ by less count as equally fast; more microbatches need less memory and win


class Bound(enum.Enum):
    """What takes longest in a step."""

    COMPUTE = "compute"
    LINK = "link"
    OPTIMIZER = "optimizer"
    NETWORK = "network"
    DISK = "disk"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine of an estimate, and the network if there are several like it.

    parameters_per_s: rate of the optimizer's kernel. ram_bytes: None if unknown.
    disk_bytes_per_s: of the disk with the optimizer's state, which reads and writes in turn.
    weight_disk_bytes_per_s: of the disk with frozen weights, which reads; None if they are in memory.
    """

    gpu: DeviceFigures
    num_devices: int
    ram_bytes: int | None
    parameters_per_s: float
    network: Network | None = None
    disk_bytes_per_s: float | None = None
    weight_disk_bytes_per_s: float | None = None

    @property
    def num_machines(self) -> int:
        return 1 if self.network is None else self.network.num_machines

    @property
    def plan_bytes(self) -> int:
        """Memory of one device that plans may use."""
        return int((self.gpu.memory_bytes - CUDA_CONTEXT_BYTES) * MEMORY_SHARE)

    def disk_s(self, state_bytes: int) -> float:
        """The seconds in which the disk reads state and writes it again."""
        assert self.disk_bytes_per_s is not None
        return 2 * state_bytes / self.disk_bytes_per_s


@dataclasses.dataclass(frozen=True)
class Work:
    """One training step of one machine: `batch` sequences of `length` tokens.

    num_microbatch: None chooses the fastest number that fits.
    """

    batch: int
    length: int
    is_exact: bool = True
    optim_dtype: torch.dtype = torch.float32
    num_microbatch: int | None = None
    optimizer: PaperOptimizer = dataclasses.field(default_factory=assumed_optimizer)
    master_bits: int = 32


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a step. Bytes by part: of one device at its peak, and in host memory.

    compute_s, link_s, optimizer_s, network_s, disk_s: what each of them takes in a step if nothing delays it.
    exposed_s: the part of the exchange over the network that is not hidden behind the rest.
    network_bytes: what a machine sends in a step, and receives.
    state_bytes: of the optimizer, in host memory or on disk.
    mapped_bytes: of frozen weights on disk. read_bytes: what a step reads of them, because memory cannot hold them.
    refusal: why it does not fit into host memory, where possible with the message of wrapping; None if it fits.
    """

    num_microbatch: int
    forecast: Forecast
    step_s: float
    compute_s: float
    link_s: float
    optimizer_s: float
    network_s: float
    disk_s: float
    exposed_s: float
    network_bytes: int
    state_bytes: int
    mapped_bytes: int
    read_bytes: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    refusal: str | None

    @property
    def bound(self) -> Bound:
        seconds = {
            Bound.COMPUTE: self.compute_s,
            Bound.LINK: self.link_s,
            Bound.OPTIMIZER: self.optimizer_s,
            Bound.NETWORK: self.network_s,
            Bound.DISK: self.disk_s,
        }
        return max(seconds, key=lambda bound: seconds[bound])

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def fits(self) -> bool:
        return self.forecast.fits and self.refusal is None


def estimate(paper: PaperModel, work: Work, machine: Machine) -> Estimate:
    """Estimate a step; with the fastest number of microbatches that fits into device memory, unless `work` has one.

    If no number fits, the estimate is that of the number that needs the least memory, and does not fit.
    """
    if work.num_microbatch is not None:
        return _estimate(paper, work, machine, work.num_microbatch)
    found = [_estimate(paper, work, machine, count) for count in _counts(work.batch)]
    fitting = [each for each in found if each.forecast.fits]
    if not fitting:
        return min(found, key=lambda each: each.device_bytes)
    fast_s = min(each.step_s for each in fitting) * (1 + _TIE)
    return max((each for each in fitting if each.step_s <= fast_s), key=lambda each: each.num_microbatch)


def _counts(batch: int) -> Iterable[int]:
    """Numbers of microbatches of 1, 2, 4, ... sequences, and one microbatch."""
    sizes = [1 << power for power in range(batch.bit_length()) if 1 << power <= batch]
    counts = sorted({-(-batch // size) for size in (*sizes, batch)})
    return [count for count in counts if count <= _MOST_MICROBATCHES]


def _estimate(paper: PaperModel, work: Work, machine: Machine, num_microbatch: int) -> Estimate:
    largest = -(-work.batch // num_microbatch)  # sequences in the largest microbatch
    costs = layer_costs(paper, machine.gpu, largest, work.length)
    profile = ModelProfile(costs, machine.num_devices, num_microbatch, machine.plan_bytes)
    trained = paper.trained_at_home()
    # Each of several machines updates its part of every layer.
    counts = [sum(p.numel() for p in params) for params in trained]
    kernel_s = [count / machine.num_machines / machine.parameters_per_s for count in counts]
    state_bytes = [work.optimizer.state_bytes(params, work.optim_dtype) // machine.num_machines for params in trained]
    disk_s = [machine.disk_s(num_bytes) if work.optimizer.is_on_disk else 0.0 for num_bytes in state_bytes]
    # The state of the next layer is read, and that of the last one written, while a layer is updated.
    update_s = [max(pair) for pair in zip(kernel_s, disk_s, strict=True)]
    exchanged = [sum(p.nbytes for p in params) for params in trained]
    # The trainers' way of exact steps: clipped, and published layer by layer. Several machines wait for the update.
    timing = UpdateTiming(is_exact=True, by_layer=machine.num_machines == 1, after_norm=machine.num_machines == 1)
    found = forecast(profile, update_s if work.is_exact else None, timing=timing)
    mapped_bytes = _mapped_bytes(paper, machine)
    host = _host_parts(paper, work, machine, found, profile, mapped_bytes)
    unpinned_bytes = 0 if not mapped_bytes else _frozen_uploads(found, profile)
    is_cached = machine.ram_bytes is not None and mapped_bytes + sum(host.values()) <= machine.ram_bytes
    read_bytes = 0 if is_cached else unpinned_bytes
    disk_read_s = read_bytes / (machine.weight_disk_bytes_per_s or math.inf)
    seconds = sum(task_seconds(task, costs) for task in found.tasks)
    link_s = _link_s(found, profile, machine, unpinned_bytes)
    # The forecast of exact steps includes their update.
    alone_s = max(found.step_s, link_s, 0.0 if work.is_exact else sum(update_s))
    if disk_read_s:  # one disk cannot do both at the same time
        alone_s = max(alone_s, disk_read_s + sum(disk_s))
    network, step_s = machine.network or Network(1, math.inf), alone_s
    exchange_s = [network.exchange_s(num_bytes) for num_bytes in exchanged]
    if machine.num_machines > 1:
        together_s = step_with_exchange_s(found, profile, update_s, exchange_s, is_exact=work.is_exact, grain="stage")
        step_s = max(step_s, together_s)
    return Estimate(
        num_microbatch=num_microbatch,
        forecast=found,
        step_s=step_s,
        compute_s=num_microbatch * seconds / machine.num_devices,
        link_s=link_s,
        optimizer_s=sum(kernel_s),
        network_s=2 * sum(exchange_s),
        disk_s=sum(disk_s) + disk_read_s,
        exposed_s=step_s - alone_s,
        network_bytes=2 * sum(exchanged) * (machine.num_machines - 1) // machine.num_machines,
        state_bytes=sum(state_bytes),
        mapped_bytes=mapped_bytes,
        read_bytes=read_bytes,
        device=_device_parts(found, profile, work.is_exact),
        host=host,
        refusal=_refusal(paper, work, machine, host, mapped_bytes),
    )


def _mapped_bytes(paper: PaperModel, machine: Machine) -> int:
    """Bytes of the weights that lie on a disk: all that do not train."""
    if machine.weight_disk_bytes_per_s is None:
        return 0
    return sum(param.nbytes for param in paper.model.parameters() if not param.requires_grad)


def _frozen_uploads(found: Forecast, profile: ModelProfile) -> int:
    """Bytes of frozen weights that a step uploads: those of a layer once for each of its passes."""
    layers = [cost for task in found.tasks for cost in profile.layers[task.layers.start : task.layers.stop]]
    return sum(cost.weight_bytes - cost.grad_bytes for cost in layers)


def _link_s(found: Forecast, profile: ModelProfile, machine: Machine, unpinned_bytes: int) -> float:
    """Seconds of the links. `unpinned_bytes`: of what they upload, those from memory that is not pinned."""
    up, down = _link_bytes(found, profile)
    rate = machine.gpu.link_bytes_per_s
    up_s = (up - unpinned_bytes) / rate + unpinned_bytes / min(rate, UNPINNED_BYTES_PER_S)
    return max(up_s, down / rate) / machine.num_devices


def _link_bytes(found: Forecast, profile: ModelProfile) -> tuple[int, int]:
    """Bytes that a step copies to all devices, and from them."""
    up = down = 0
    for task in found.tasks:
        layers = profile.layers[task.layers.start : task.layers.stop]
        up += sum(cost.weight_bytes for cost in layers)
        if task.kind is not TaskKind.FORWARD:
            down += sum(cost.grad_bytes for cost in layers)
        inputs = profile.num_microbatch * layers[0].input_bytes
        # A recomputation starts from an input that was saved in host memory. With several devices, the task before ran
        # on another one, and what it passes on goes through host memory, too.
        trips = (task.kind is TaskKind.BACKWARD) + (profile.num_devices > 1)
        up, down = up + trips * inputs, down + trips * inputs
    return up, down


def _device_parts(found: Forecast, profile: ModelProfile, is_exact: bool) -> dict[str, int]:
    """Bytes of one device at its peak, by part."""
    memory = StageMemory(profile.layers, "stage", profile.num_microbatch)
    weights, gradients = memory.buffer_bytes(found.tasks, profile.num_devices)
    overlapping = found.peak_bytes - memory.peak_bytes(found.tasks, profile.num_devices)
    # Where memory is left, the weights of the next call arrive while this call still uses its weights. After an exact
    # step they arrive when the call is over.
    spare = 0 if is_exact else max(found.weight_room_bytes - weights, 0)
    # A plan reserves room for a gradient beside the loss, but the loss is at its peak before the first gradient exists.
    fused = next(task for task in found.tasks if task.kind is TaskKind.FUSED)
    fresh = max(profile.layers[layer_id].grad_bytes for layer_id in fused.layers)
    parts = {
        "weights": weights,
        "weights of the next call": min(spare, sum(cost.weight_bytes for cost in profile.layers)),
        "gradients": gradients,
        "activations and loss": found.peak_bytes - overlapping - weights - gradients - fresh,
        "activations of tail and wave": overlapping,
    }
    return {name: size for name, size in parts.items() if size}


def _host_parts(
    paper: PaperModel, work: Work, machine: Machine, found: Forecast, profile: ModelProfile, mapped_bytes: int
) -> dict[str, int]:
    """Bytes in host memory by part: what the check at wrapping counts, and inputs saved for recomputation."""
    rows = training_memory(
        [paper.model],
        work.optim_dtype,
        PinMode.REGISTER,
        num_machines=machine.num_machines,
        optimizer=work.optimizer,
        master_bits=work.master_bits,
        mapped_bytes=mapped_bytes,
    )
    if work.is_exact:
        del rows[SECOND_WEIGHTS]
    recomputed = [task for task in found.tasks if task.kind is TaskKind.BACKWARD]
    saved = sum(profile.layers[task.layers.start].input_bytes for task in recomputed)
    rows[SAVED_INPUTS] = profile.num_microbatch * saved
    return {name: size for name, size in rows.items() if size}


def _refusal(paper: PaperModel, work: Work, machine: Machine, host: Mapping[str, int], mapped_bytes: int) -> str | None:
    """Why the host memory does not suffice; None if it does or is not known.

    Wrapping cannot count the inputs that recomputation needs, because it does not know the batch.
    """
    if machine.ram_bytes is None:
        return None
    try:
        require_training_memory(
            [paper.model],
            work.optim_dtype,
            PinMode.REGISTER,
            is_async=not work.is_exact,
            warns_of_async=False,
            available=machine.ram_bytes,
            num_machines=machine.num_machines,
            optimizer=work.optimizer,
            master_bits=work.master_bits,
            mapped_bytes=mapped_bytes,
        )
    except HostMemoryError as error:
        return str(error)
    missing = sum(host.values()) - machine.ram_bytes
    if missing <= 0:
        return None
    return (
        "training this model fits into host memory, but the inputs saved for recomputation do not: "
        f"{missing / 1e9:.1f} GB are missing. Use fewer or shorter sequences per step (their inputs take "
        f"{host[SAVED_INPUTS] / 1e9:.1f} GB), or more device memory."
    )
