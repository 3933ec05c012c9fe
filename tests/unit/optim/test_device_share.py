"""A share of an update on devices has the bits of the host alone, whatever the pieces, the rates and the failures."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers_adam import adam_numbers
from helpers_faults import Boom, caught_from, notes_of
from roundpipe.devices import Event, MemoryUse, StreamKind
from roundpipe.devices.virtual import NoPinner, VirtualDevice
from roundpipe.errors import ConfigError
from roundpipe.optim import SGD, AdamW, device_share
from roundpipe.optim.device_share import DeviceShare
from roundpipe.optim.native import kernel as kernel_module
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store import HalvedMaster

PIECE = 256
UPDATE_STREAMS = (StreamKind.UPDATES, StreamKind.MORE_UPDATES)


@pytest.fixture
def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None
    return made


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "PIECE", PIECE)
    monkeypatch.setattr(device_share, "_SMALLEST", PIECE)


@pytest.fixture
def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share._Helper, "_is_worth", lambda self, num_left, count: True)


def parameter(count: int, seed: int, shape: tuple[int, ...] | None = None) -> KernelParameter:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    halves = HalvedMaster(torch.zeros(count, dtype=torch.bfloat16))
    team = one_pass_kernel()
    assert team is not None
    team.halve(values, halves)
    halves.weight = halves.weight.view(shape or (count,))
    moments = [torch.rand(halves.weight.shape, generator=generator) for _ in range(2)]
    gradient = torch.randn(halves.weight.shape, generator=generator).to(torch.bfloat16)
    weight = torch.zeros(halves.weight.shape, dtype=torch.bfloat16)
    return KernelParameter(halves, gradient, moments, weight, adam_numbers(3, factors=(0.5,)))


def in_8_bits(count: int, seed: int) -> KernelParameter:
    made = parameter(count, seed)
    codes = [torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)]
    scales = [torch.zeros(-(-count // 256)) for _ in codes]
    numbers = dataclasses.replace(made.numbers, step=7)
    return dataclasses.replace(made, states=codes, scales=scales, numbers=numbers)


def layer() -> list[KernelParameter]:
    """Sizes at, below and above pieces, one that stays on the host, and one with two dimensions."""
    return [parameter(size, size) for size in (4 * PIECE, 37, 3 * PIECE + 8, PIECE, 5 * PIECE - 3)] + [
        parameter(6 * PIECE, 1, (12, PIECE // 2)),
        in_8_bits(5 * PIECE + 11, 2),
    ]


def tensors_of(parameters: list[KernelParameter]) -> list[Tensor]:
    found: list[Tensor] = []
    for each in parameters:
        assert isinstance(each.master, HalvedMaster)
        assert each.weight is not None
        found += [each.master.low, each.master.ties, each.weight, *each.states, *each.scales]
    return found


def update(
    share: DeviceShare, kernel: OnePassKernel, parameters: list[KernelParameter], devices: list[VirtualDevice]
) -> None:
    copies: Any = [types.SimpleNamespace(record=types.SimpleNamespace(cuts=())) for _ in parameters]
    share.update(kernel, parameters, copies, types.SimpleNamespace(devices=devices, pinner=NoPinner()))  # type: ignore[arg-type]


@contextlib.contextmanager
def a_host_that_waits_for_devices(kernel: OnePassKernel) -> Iterator[OnePassKernel]:
    """A kernel that begins when devices have left nothing but what it has taken first, a piece and what is smaller."""

    class Slow(OnePassKernel):
        def __init__(self) -> None:
            pass

        def update(self, parameters: Any) -> None:
            while pieces[-1].has_any:
                pass
            kernel.update(parameters)

    pieces: list[Any] = []
    make = device_share._Pieces.__init__

    def noted(self: Any, *args: Any) -> None:
        make(self, *args)
        pieces.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_share._Pieces, "__init__", noted)
        patch.setattr(device_share, "_HOST_PIECES", 1)
        yield Slow()


def check(kernel: OnePassKernel, parameters: list[KernelParameter]) -> None:
    expected = layer()
    kernel.update(expected)
    for one, other in zip(tensors_of(parameters), tensors_of(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_pieces_have_the_bits_of_the_kernel(kernel: OnePassKernel, num_devices: int, always_worth: None) -> None:
    for round_ in range(20):
        share, parameters = DeviceShare(), layer()
        devices = [VirtualDevice(20 * round_ + index) for index in range(num_devices)]
        update(share, kernel, parameters, devices)
        check(kernel, parameters)
        assert share.num_elements >= num_devices * 11
    assert not [thread for thread in threading.enumerate() if "update on" in thread.name]


def test_devices_can_do_all_that_is_large_enough(kernel: OnePassKernel, always_worth: None) -> None:
    share, parameters = DeviceShare(), [parameter(9 * PIECE, 1), parameter(40, 2)]
    expected = copy.deepcopy(parameters)
    with a_host_that_waits_for_devices(kernel) as slow:
        update(share, slow, parameters, [VirtualDevice(0), VirtualDevice(1)])
    kernel.update(expected)
    for one, other in zip(tensors_of(parameters), tensors_of(expected), strict=True):
        assert torch.equal(one, other)
    assert share.num_elements >= 8 * PIECE


def test_a_device_begins_when_its_link_is_idle(kernel: OnePassKernel, always_worth: None) -> None:
    class Pending:
        def done(self) -> bool:
            return False

    class BusyAtFirst(VirtualDevice):
        num_asked = 0

        def record(self, stream: StreamKind) -> Event:
            self.num_asked += stream is StreamKind.WEIGHTS_UP
            is_busy = stream is StreamKind.WEIGHTS_UP and self.num_asked < 5
            return Pending() if is_busy else super().record(stream)  # type: ignore[return-value]

    share, parameters, device = DeviceShare(), layer(), BusyAtFirst(0)
    with a_host_that_waits_for_devices(kernel) as slow:
        update(share, slow, parameters, [device])
    check(kernel, parameters)
    assert device.num_asked > 5
    assert share.num_elements


# Failures.


class Faulty(VirtualDevice):
    """Raises Boom in one of the calls that an update makes. `what` says which kind of call it was."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at, self.num_calls, self.what = at, 0, ""

    def _call(self, stream: StreamKind, what: str) -> None:
        if stream in UPDATE_STREAMS:
            self.num_calls += 1
            if self.num_calls == self.at:
                self.what = what
                raise Boom(what)

    def device_empty_strided(self, shape: Any, stride: Any, dtype: torch.dtype, stream: StreamKind) -> Tensor:
        self._call(stream, "up")
        made = super().device_empty_strided(shape, stride, dtype, stream)
        made.is_on_device = True  # type: ignore[attr-defined]
        return made

    def copy(self, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
        self._call(stream, "up" if hasattr(destination, "is_on_device") else "down")
        super().copy(destination, source, stream)

    def computing(self, stream: StreamKind = StreamKind.COMPUTE) -> Any:
        self._call(stream, "up")
        super().record(stream).wait()
        return contextlib.nullcontext()

    def record(self, stream: StreamKind) -> Event:
        self._call(stream, "down")
        return super().record(stream)

    def multiply_add(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        self._call(StreamKind.UPDATES, "up")
        return super().multiply_add(a, b, c)


def test_a_device_that_fails_anywhere(
    kernel: OnePassKernel, always_worth: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its results are on their way the host takes over; later the error comes out when nothing runs any more."""
    seen = set()
    for at in range(1, 80):
        share, parameters, faulty = DeviceShare(), layer(), Faulty(at)
        devices = [faulty, VirtualDevice(1)]
        error = caught_from(lambda: update(share, kernel, parameters, devices))  # noqa: B023
        if error is None:
            check(kernel, parameters)
        else:
            assert isinstance(error, Boom)
            assert "while updating a share of a layer on" in notes_of(error)[0]
        assert (error is not None) is (faulty.what == "down"), f"call {at}"
        seen.add(faulty.what)
        faulty.what = ""
        if faulty.num_calls >= at:
            num_calls = faulty.num_calls
            update(share, kernel, parameters, devices)
            assert faulty.num_calls == num_calls, "a device that has failed takes no part any more"
            assert share.num_elements
    assert seen >= {"up", "down"}
    assert "takes no part in the updates of the optimizer any more" in caplog.text


def test_a_host_that_fails_stops_the_devices(kernel: OnePassKernel, always_worth: None) -> None:
    class Failing(OnePassKernel):
        def __init__(self) -> None:
            pass

        def update(self, parameters: Any) -> None:
            raise Boom

    with pytest.raises(Boom):
        update(DeviceShare(), Failing(), layer(), [VirtualDevice(0)])
    assert not [thread for thread in threading.enumerate() if "update on" in thread.name]


def test_tensors_that_do_not_match_change_nothing(kernel: OnePassKernel, always_worth: None) -> None:
    parameters = layer()
    parameters[-1].states = [parameters[-1].states[0]]
    before = copy.deepcopy(tensors_of(parameters[:-1]))
    with pytest.raises(RuntimeError, match="needs 2 states for ADAM, got 1"):
        update(DeviceShare(), kernel, parameters, [VirtualDevice(0)])
    for one, other in zip(tensors_of(parameters[:-1]), before, strict=True):
        assert torch.equal(one, other)


# Who takes what.


def is_worth(own_rate: float | None, host_rate: float | None, num_left: int, under_way: int = 0) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_share, "measured_rate", lambda: host_rate)
        helper = device_share._Helper(VirtualDevice(0), None, device_share._Speed(own_rate))  # type: ignore[arg-type]
        helper._num_under_way = under_way
        return helper._is_worth(num_left, PIECE)


def test_a_device_takes_what_it_finishes_before_the_host() -> None:
    assert is_worth(1e9, 4e9, 4 * PIECE)
    assert not is_worth(1e9, 4e9, 4 * PIECE - 1)
    assert not is_worth(1e9, 4e9, 4 * PIECE, under_way=1)
    assert is_worth(None, 4e9, PIECE)  # to measure it
    assert is_worth(1e9, None, PIECE)


def test_a_device_that_is_too_slow_is_tried_again(kernel: OnePassKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module._rate, "per_second", 1e9)
    share, device = DeviceShare(), VirtualDevice(0)
    speed = share._speeds[device] = device_share._Speed(1e7)
    for _ in range(200):
        monkeypatch.setattr(kernel_module._rate, "per_second", 1e9)
        parameters = layer()
        update(share, kernel, parameters, [device])
        check(kernel, parameters)
        if share.num_elements:
            break
    assert share.num_elements
    assert speed.per_second is not None


def test_a_device_takes_nothing_while_weights_are_uploaded(
    kernel: OnePassKernel, always_worth: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pending:
        def done(self) -> bool:
            return False

    class Busy(VirtualDevice):
        def record(self, stream: StreamKind) -> Event:
            return Pending() if stream is StreamKind.WEIGHTS_UP else super().record(stream)  # type: ignore[return-value]

    share, parameters = DeviceShare(), layer()
    update(share, kernel, parameters, [Busy(0)])
    check(kernel, parameters)
    assert not share.num_elements


def test_a_device_without_unused_memory_takes_nothing(kernel: OnePassKernel, always_worth: None) -> None:
    class Small(VirtualDevice):
        def memory_limit_bytes(self) -> int | None:
            return 10**6

        def memory_use(self) -> MemoryUse | None:
            return MemoryUse(0, self.peak)

    for peak, takes in ((10**6 - 2 * 128 * PIECE, True), (10**6 - 2 * 128 * PIECE + 1, False)):
        share, device = DeviceShare(), Small(0)
        device.peak = peak  # type: ignore[attr-defined]
        update(share, kernel, layer(), [device])
        assert bool(share.num_elements) is takes


def test_states_in_files_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"on_devices=True and state_folder=.*leave one of the two out"):
        AdamW([torch.nn.Parameter(torch.zeros(2))], on_devices=True, state_folder=tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"), [(AdamW, {"foreach": True}), (AdamW, {"fused": False}), (SGD, {"fused": True})]
)
def test_options_that_choose_the_implementation_of_torch_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} got on_devices=True and .*{next(iter(options))}="):
        kind([torch.nn.Parameter(torch.zeros(2))], on_devices=True, **options)


def test_whole_pages_are_pinned_once_and_unpinned_with_their_tensor(
    kernel: OnePassKernel, always_worth: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pinner(NoPinner):
        pinned: set[int] = set()  # noqa: RUF012

        def pin(self, address: int, num_bytes: int) -> bool:
            assert address not in self.pinned
            self.pinned.add(address)
            return True

        def unpin(self, address: int) -> None:
            self.pinned.remove(address)

    monkeypatch.setattr(device_share, "HUGE_PAGE_BYTES", 1)
    pinner, share = Pinner(), DeviceShare()
    parameters: list[KernelParameter] | None = [parameter(8 * PIECE, 1)]
    for _ in range(2):
        copies: Any = [types.SimpleNamespace(record=types.SimpleNamespace(cuts=()))]
        share.update(kernel, parameters, copies, types.SimpleNamespace(devices=[VirtualDevice(0)], pinner=pinner))  # type: ignore[arg-type]
    assert parameters is not None
    master = parameters[0].master
    assert isinstance(master, HalvedMaster)
    assert {master.low.data_ptr(), master.ties.data_ptr()} <= pinner.pinned
    del master
    parameters = None
    assert not pinner.pinned
