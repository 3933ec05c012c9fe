"""Claims: what machines of a process group send, how much of it computation hides, and the memory that each needs.

    python benchmarks/bench_machines.py [--parts bytes,hidden,memory] [--warm 2] [--steps 4] [--delay-ms 0]

1, 2 and 4 processes stand for machines. Each runs in a network namespace (root only), which has one link to a virtual
switch; `tc` limits the rate of the links. Without namespaces the processes use loopback, and what needs a rate is left
out. Every process has one thread for kernels.

* bytes: bytes that each machine sends in a step, counted by the library and by its network interface, against
  4 (N - 1) / N bytes per parameter. The interface counts one header per segment of up to 64 KiB.
* hidden: step time of two machines for several rates of their links, against the same training without a group and
  against a prediction. The hidden share is 1 - (step - step without a group) / exchange alone. A balanced link has the
  rate at which the exchange alone takes as long as a step without it. Layers of this part wait (time.sleep) instead of
  computing: here the processes have few cores, and computation would compete with the exchange for them, as it does
  not on machines whose GPUs compute.
* memory: host memory of each of four machines after exact steps with bfloat16 weights, against 2 + 2 + 10 / 4 bytes per
  parameter. Virtual devices hold their buffers in host memory, too: here in shared memory, which is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import gc
import itertools
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import HostMemoryPeak, Table, anonymous_bytes, options_parser
from torch import Tensor, nn
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from virtual_network import PORT, Network, Place, Processes, loopback, unavailable

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices.virtual import VirtualDevice, poisoned
from roundpipe.distributed.exchange import Exchange
from roundpipe.optim import Adam
from roundpipe.optim.native.kernel import OnePassKernel
from roundpipe.plan.forecast import exchanged_update_s
from roundpipe.store.update import LayerUpdate

PARTS = ("bytes", "hidden", "memory")
MOST_MACHINES = 4
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "roundpipe")  # a first step imports torch._dynamo
GROUP_TIMEOUT_S = 60.0
CALL_S = 120.0  # limit of one measurement
NUM_OPENING_STEPS = 5
HOST_KINDS = ("RssAnon",)
_M_MMAP_THRESHOLD = -3  # of mallopt
BYTES_PER_WEIGHT = 2
MBIT = 1e6
# Relative to the balanced rate.
RATES = (2.0, 1.0, 0.5)
FIRST_RATE = 400 * MBIT


# The training, inside one process.


@dataclasses.dataclass(frozen=True)
class Work:
    """A model of equal layers and its batch. `forward_s`: for which a layer waits per microbatch; backward: twice."""

    num_layers: int
    width: int
    num_microbatch: int = 4
    rows: int = 2  # of a microbatch
    forward_s: float = 0.0
    one_layer_stages: bool = False

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.width**2

    def sent_bytes(self, size: int) -> float:
        """What each of `size` machines should send in a step: gradients and new weights."""
        return 2 * BYTES_PER_WEIGHT * (size - 1) / size * self.num_parameters

    def config(self) -> RoundPipeRunConfig:
        plan = None
        if self.one_layer_stages:
            ranges = [range(i, i + 1) for i in range(self.num_layers)]
            plan = ModelExecutePlan(ranges[:-1], list(reversed(ranges)))
        return RoundPipeRunConfig(num_microbatch=self.num_microbatch, loss_reduction="mean", execute_plan=plan)


BYTES_WORK = Work(num_layers=8, width=1024)
HIDDEN_WORK = Work(num_layers=8, width=1024, forward_s=0.005)
MEMORY_WORK = Work(num_layers=100, width=1024, num_microbatch=1, one_layer_stages=True)
SMALL_WORK = Work(num_layers=3, width=32, num_microbatch=1, one_layer_stages=True)


class _Wait(torch.autograd.Function):
    """The identity, which takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(work.width, work.width, dtype=torch.bfloat16))
        self._forward_s = work.forward_s

    def forward(self, x: Tensor) -> Tensor:
        y = x + nn.functional.linear(x, self.weight)
        return _Wait.apply(y, self._forward_s) if self._forward_s else y


class Marks:
    """Notes when layers have landed, and the seconds of exchanges and updates, in the order of events."""

    def __init__(self) -> None:
        self.landed_s: list[float] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._wrap(Exchange, "_fetch", "fetch")
        self._wrap(Exchange, "_gather", "gather")
        self._wrap(OnePassKernel, "update", "update")
        real = LayerUpdate._take

        def take(update: LayerUpdate) -> None:
            self.landed_s.append(time.perf_counter())
            real(update)

        LayerUpdate._take = take  # type: ignore[method-assign]

    def _wrap(self, owner: type, name: str, what: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args)
            finally:
                self.seconds[what].append(time.perf_counter() - start)

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.landed_s.clear()
        self.seconds.clear()


@dataclasses.dataclass(frozen=True)
class Steps:
    """What one machine has measured, per step: medians of seconds, means of bytes.

    landed_s: when layers landed, in the order of landing, from the beginning of the call on (exact steps).
    fetch_s, gather_s, update_s: sums over the layers. `wire_bytes`: counted by the interface.
    """

    step_s: float
    landed_s: list[float]
    fetch_s: float
    gather_s: float
    update_s: float
    sent_bytes: float
    received_bytes: float
    wire_bytes: float

    @property
    def exchange_s(self) -> float:
        return self.fetch_s + self.gather_s


class Training:
    """The training of one machine."""

    def __init__(self, rank: int, size: int, work: Work, place: Place, *, has_group: bool) -> None:
        self.work, self.place, self.size = work, place, size
        self.model = RoundPipe(
            nn.Sequential(*(Layer(work) for _ in range(work.num_layers))),
            optim_dtype=torch.float32,
            model_run_config=work.config(),
            devices=["cpu"],
            process_group=dist.group.WORLD if has_group else None,
        )
        self._optimizer = Adam(self.model.optim_parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(rank)
        self._x = torch.randn(work.rows * work.num_microbatch, work.width, generator=generator).to(torch.bfloat16)

    def step(self, *, is_async: bool) -> float:
        loss = self.model.forward_backward((self._x,), label=self._x, loss_fn=_loss)
        self.model.step(self._update, is_async=is_async)
        return float(loss)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def measured(self, num_warm: int, num_timed: int, *, is_async: bool) -> Steps:
        self.model.synchronize()
        before = self._counts()
        for _ in range(num_warm):
            self.step(is_async=is_async)
        _marks().clear()
        begun_s = [time.perf_counter()]
        for _ in range(num_timed):
            self.step(is_async=is_async)
            begun_s.append(time.perf_counter())
        landed_s = list(_marks().landed_s)
        self.model.synchronize()
        num_steps = num_warm + num_timed  # bytes are counted from idle to idle
        counted = [(b - a) / num_steps for a, b in zip(before, self._counts(), strict=True)]
        layers = []
        if not is_async:
            since = [
                [at - begin for at in part] for begin, part in zip(begun_s, _parts(landed_s, num_timed), strict=False)
            ]
            layers = [statistics.median(times) for times in zip(*since, strict=True)]
        durations = [b - a for a, b in itertools.pairwise(begun_s)]
        return Steps(
            statistics.median(durations),
            layers,
            *(_per_step(_marks().seconds[name], num_timed) for name in ("fetch", "gather", "update")),
            *counted,
        )

    def _counts(self) -> tuple[int, int, int]:
        machines = self.model._engine.group.machines
        if machines is None:
            return 0, 0, self.place.sent_bytes()
        return machines.sent_bytes, machines.received_bytes, self.place.sent_bytes()


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """`values` in `count` parts of equal length, the first ones first."""
    length = len(values) // count
    return [values[i * length : (i + 1) * length] for i in range(count)]


def _per_step(seconds: Sequence[float], num_steps: int) -> float:
    """The median of the sums of each step."""
    return statistics.median(sum(part) for part in _parts(seconds, num_steps))


def _loss(y: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(y.float(), label.float().flip(0))


_trainings: list[Training] = []  # of this process; at most one
_all_marks: list[Marks] = []


def _marks() -> Marks:
    if not _all_marks:
        _all_marks.append(Marks())
    return _all_marks[0]


# Functions that the processes run.


def open_training(rank: int, size: int, work: Work, places: Sequence[Place], port: int, has_group: bool = True) -> None:
    torch.set_num_threads(1)
    _marks()
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    address = f"tcp://{places[0].address}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timeout)
    _trainings.append(Training(rank, size, work, places[rank], has_group=has_group))
    for _ in range(NUM_OPENING_STEPS):  # they connect the machines, and the planner measures
        _trainings[0].step(is_async=False)


def measure(rank: int, size: int, num_warm: int, num_timed: int, is_async: bool) -> Steps:
    return _trainings[0].measured(num_warm, num_timed, is_async=is_async)


def close_training(rank: int, size: int) -> None:
    _trainings.pop().model.close()
    dist.destroy_process_group()
    gc.collect()


def return_freed_memory() -> None:
    """Let the C library give freed memory back to the system at once, so that it is not counted."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes of one process beyond what it had before the model was made."""

    peak_bytes: int
    steady_bytes: int


def allocate_devices_in_shared_memory() -> None:
    """Tell the buffers of virtual devices from host memory: afterwards RssAnon does not contain them."""

    def empty(device: VirtualDevice, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, _: Any) -> Tensor:
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        storage = torch.UntypedStorage._new_shared(max(1, count) * dtype.itemsize, device="cpu")
        return poisoned(torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride)))

    VirtualDevice.device_empty_strided = empty  # type: ignore[method-assign, assignment]


def measure_memory(rank: int, size: int, work: Work, places: Sequence[Place], port: int, num_steps: int) -> HostMemory:
    allocate_devices_in_shared_memory()
    open_training(rank, size, SMALL_WORK, places, port)  # imports everything and starts every kind of thread
    _trainings.pop().model.close()
    gc.collect()
    return_freed_memory()
    before_bytes = anonymous_bytes(HOST_KINDS)
    peak = HostMemoryPeak(HOST_KINDS)
    _trainings.append(Training(rank, size, work, places[rank], has_group=True))
    for _ in range(num_steps):
        _trainings[0].step(is_async=False)
    return_freed_memory()
    steady_bytes = anonymous_bytes(HOST_KINDS) - before_bytes
    return HostMemory(peak.close(), steady_bytes)


# The parts.


class Room:
    """The machines of this benchmark: a network, if there is one, and processes."""

    def __init__(self, network: Network | None, delay_s: float) -> None:
        self.network, self.delay_s = network, delay_s
        self.places = [loopback()] * MOST_MACHINES if network is None else network.places
        self._port = PORT

    def next_port(self) -> int:
        """A new port for every process group: that of a group before may still be in use."""
        self._port += 1
        return self._port

    def limit(self, bits_per_s: float | None, size: int) -> None:
        if self.network is not None:
            for rank in range(size):
                self.network.limit(rank, bits_per_s, self.delay_s)

    @contextlib.contextmanager
    def training(self, size: int, work: Work, *, has_group: bool = True) -> Iterator[Callable[..., list[Steps]]]:
        """Processes with a training; gives a function of (num_warm, num_timed, is_async) that measures steps."""
        with Processes(self.places[:size], PRELOAD) as processes:
            processes.call(open_training, work, self.places, self.next_port(), has_group, limit_s=CALL_S)
            yield lambda *args: processes.call(measure, *args, limit_s=CALL_S)
            processes.call(close_training, limit_s=CALL_S)


def off(value: float, target: float) -> str:
    return f"{100 * (value / target - 1):+.2f} %"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f} MB"


def part_bytes(room: Room, options: argparse.Namespace) -> None:
    work = BYTES_WORK
    print(f"\nBytes of a machine and step: {work.num_parameters:,} parameters in {work.num_layers} layers, bfloat16")
    table = Table("theory", "sent", "", "interface", "", "step")
    for size in (1, 2, MOST_MACHINES):
        with room.training(size, work) as measured:
            for is_async in (False, True):
                ranks = measured(options.warm, options.steps, is_async)
                theory = work.sent_bytes(size)
                worst = max(ranks, key=lambda steps: abs(steps.sent_bytes - theory))
                wire = max(ranks, key=lambda steps: abs(steps.wire_bytes - theory))
                add_bytes(table, f"{size} machines, {mode(is_async)}", theory, worst, wire, room.network is not None)


def add_bytes(table: Table, name: str, theory: float, worst: Steps, wire: Steps, has_wire: bool) -> None:
    cells = [megabytes(theory), megabytes(worst.sent_bytes), off(worst.sent_bytes, theory) if theory else "-"]
    cells += [megabytes(wire.wire_bytes), off(wire.wire_bytes, theory) if theory else "-"] if has_wire else ["-", "-"]
    table.add(name, *cells, f"{1e3 * worst.step_s:.0f} ms")


def mode(is_async: bool) -> str:
    return "stale" if is_async else "exact"


def part_hidden(room: Room, options: argparse.Namespace) -> None:
    if room.network is None:
        print("\nHidden share: left out, because it needs links with a rate.")
        return
    pace = (options.warm, options.steps)
    work = HIDDEN_WORK
    print(
        f"\nTwo machines, {work.num_parameters:,} parameters in {work.num_layers} layers, {work.num_microbatch} "
        f"microbatches; layers wait {1e3 * work.forward_s:.0f} ms forward, {2e3 * work.forward_s:.0f} ms backward"
    )
    alone = steps_alone(room, work, pace)
    exchange = exchange_of(room, alone[True].step_s, pace)
    print(f"Balanced link: {exchange.balanced / MBIT:.0f} Mb/s each way")
    table = Table("alone", "exchange", "step", "hidden", "predicted", "step off by")
    with room.training(2, work) as measured:
        for factor in (math.inf, *RATES):
            room.limit(exchange.rate(factor), 2)
            for is_async in (False, True):
                add_hidden(table, exchange, factor, alone[is_async], slowest(measured(*pace, is_async)), is_async)
    fine = dataclasses.replace(work, one_layer_stages=True)
    alone = steps_alone(room, fine, pace, modes=(False,))
    with room.training(2, fine) as measured:
        room.limit(exchange.rate(1.0), 2)
        add_hidden(table, exchange, 1.0, alone[False], slowest(measured(*pace, False)), False, ", a stage per layer")
        room.limit(None, 2)


def steps_alone(
    room: Room, work: Work, pace: tuple[int, int], modes: Sequence[bool] = (False, True)
) -> dict[bool, Steps]:
    """Steps of two machines that train without a group, by is_async."""
    with room.training(2, work, has_group=False) as measured:
        return {is_async: slowest(measured(*pace, is_async)) for is_async in modes}


@dataclasses.dataclass(frozen=True)
class ExchangeTime:
    """The exchange of HIDDEN_WORK alone. `balanced`: rate in bits per second; `seconds`: by factor of this rate."""

    balanced: float
    seconds: dict[float, float]
    bare: Steps  # without a limit

    def rate(self, factor: float) -> float | None:
        return None if factor == math.inf else factor * self.balanced


def exchange_of(room: Room, compute_s: float, pace: tuple[int, int]) -> ExchangeTime:
    """Measure the exchange of two machines whose layers do not wait; find the rate at which it takes `compute_s`.

    One part of its time depends on the rate, one does not. So the time for other rates follows from two of them.
    """
    with room.training(2, dataclasses.replace(HIDDEN_WORK, forward_s=0.0)) as measured:
        bare = slowest(measured(*pace, False))
        rate = FIRST_RATE
        room.limit(rate, 2)
        on_wire_s = slowest(measured(*pace, False)).exchange_s - bare.exchange_s
        rate *= on_wire_s / (compute_s - bare.exchange_s)
        room.limit(rate, 2)
        on_wire_s = slowest(measured(*pace, False)).exchange_s - bare.exchange_s
        room.limit(None, 2)
    seconds = {factor: bare.exchange_s + on_wire_s / factor for factor in (math.inf, *RATES)}
    return ExchangeTime(rate, seconds, bare)


def add_hidden(
    table: Table, exchange: ExchangeTime, factor: float, alone: Steps, steps: Steps, is_async: bool, note: str = ""
) -> None:
    exchange_s = exchange.seconds[factor]
    hidden = 1 - (steps.step_s - alone.step_s) / exchange_s
    wire_s = HIDDEN_WORK.sent_bytes(2) * 8 / (factor * exchange.balanced)
    predicted = prediction(alone, exchange.bare, wire_s, HIDDEN_WORK.num_layers, is_async=is_async)
    rate = "no limit" if factor == math.inf else f"{factor * exchange.balanced / MBIT:.0f} Mb/s"
    balanced = " (balanced)" if factor == 1 else ""
    milliseconds = [f"{1e3 * seconds:.0f} ms" for seconds in (alone.step_s, exchange_s, steps.step_s, predicted)]
    milliseconds.insert(3, f"{100 * hidden:.0f} %")
    table.add(f"{rate}{balanced}, {mode(is_async)}{note}", *milliseconds, off(steps.step_s, predicted))


def slowest(ranks: Sequence[Steps]) -> Steps:
    return max(ranks, key=lambda steps: steps.step_s)


def prediction(alone: Steps, bare: Steps, wire_s: float, num_layers: int, *, is_async: bool) -> float:
    """The predicted step: landings of a training without exchange, exchanges without a limit, and time on the wire.

    A stale step begins when all layers have landed, and the next call runs beside it.
    """
    landed = [0.0] * num_layers if is_async else list(reversed(alone.landed_s))
    fetch, gather, update = (
        [seconds / num_layers] * num_layers
        for seconds in (bare.fetch_s + wire_s / 2, bare.gather_s + wire_s / 2, bare.update_s)
    )
    final = [(layer_id, landed[layer_id]) for layer_id in reversed(range(num_layers))]
    return max(alone.step_s, exchanged_update_s(final, update, fetch, gather))


def part_memory(room: Room, options: argparse.Namespace) -> None:
    work, size = MEMORY_WORK, MOST_MACHINES
    print(f"\nHost memory of {size} machines, exact: {work.num_parameters:,} parameters in {work.num_layers} layers")
    with Processes(room.places[:size], PRELOAD) as processes:
        ranks = processes.call(
            measure_memory, work, room.places, room.next_port(), options.warm + options.steps, limit_s=CALL_S
        )
    theory = 2 * BYTES_PER_WEIGHT + 10 / size
    table = Table("bytes/param.", f"of {theory}", "peak/param.", f"of {theory}")
    for rank, memory in enumerate(ranks):
        steady, peak = (num_bytes / work.num_parameters for num_bytes in (memory.steady_bytes, memory.peak_bytes))
        table.add(f"rank {rank}", f"{steady:.3f}", off(steady, theory), f"{peak:.3f}", off(peak, theory))


def main() -> None:
    parser = options_parser(__doc__)
    parser.set_defaults(warm=2, steps=4)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of each link")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # an exception, so that everything is removed
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # names of hosts are not known in namespaces
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}")
    reason = unavailable()
    if reason is not None:
        print(f"{reason}; the processes use loopback")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(MOST_MACHINES)) if reason is None else None
        delay_s = options.delay_ms / 1e3
        if delay_s and network is not None and network.no_delay is not None:
            print(f"links cannot be delayed here: {network.no_delay}")
            delay_s = 0.0
        room = Room(network, delay_s)
        functions = {"bytes": part_bytes, "hidden": part_hidden, "memory": part_memory}
        for part in options.parts.split(","):
            functions[part](room, options)
            room.limit(None, MOST_MACHINES)


if __name__ == "__main__":
    main()
