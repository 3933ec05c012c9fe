"""LayerGradients: one flat buffer gathers all microbatches, with the sums of autograd, and views are made once."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.errors import UsageError
from roundpipe.runtime.gradients import LayerGradients
from roundpipe.store.host_memory import LandingBuffers


class Buffers:
    """Device buffers in plain memory, which are free at once."""

    def __init__(self) -> None:
        self.free: dict[int, Tensor] = {}
        self.num_made = 0

    def take(self, num_bytes: int) -> Tensor:
        if num_bytes not in self.free:
            self.num_made += 1
            return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)
        return self.free.pop(num_bytes).fill_(0xAB)

    def give(self, buffer: Tensor, free_after: Sequence[Any]) -> None:
        assert free_after == ["arrived"]
        self.free[len(buffer)] = buffer


class Transfer:
    """Copies at once."""

    def gradients_down(self, host: Tensor, gradients: Tensor) -> str:
        host.copy_(gradients)
        return "arrived"


class Bench:
    """A layer with three parameters as a replica has it, and the same layer in plain PyTorch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 3))]
        self.plain = [nn.Parameter(param.detach().clone()) for param in self.params]
        records = [types.SimpleNamespace(name=f"p{i}") for i in range(3)]
        self.replica: Any = types.SimpleNamespace(
            record=types.SimpleNamespace(parameters=records), parameters=self.params
        )
        self.buffers: Any = Buffers()
        self.landing = LandingBuffers(None)

    def gradients(self) -> LayerGradients:
        return LayerGradients(self.replica, self.buffers)

    def backward(self, seed: int, used: Sequence[int] = (0, 1, 2)) -> None:
        for params in (self.params, self.plain):
            for i in used:
                if params[i].requires_grad:
                    factor = torch.randn(params[i].shape, generator=torch.Generator().manual_seed(seed + i))
                    (params[i].sin() * factor).sum().backward()

    def downloaded(self, gradients: LayerGradients) -> dict[str, Tensor]:
        transfer: Any = Transfer()
        sent = gradients.download(transfer, self.landing)
        assert all(param.grad is None for param in self.params)
        return {} if sent is None else {gradient.record.name: gradient.tensor.clone() for gradient in sent[0]}

    def expected(self) -> dict[str, Tensor]:
        found = {f"p{i}": param.grad.clone() for i, param in enumerate(self.plain) if param.grad is not None}
        for param in self.plain:
            param.grad = None
        return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("used", [[(0, 1, 2)] * 3, [(0,), (0, 2), (1,)], [(), (1,), ()]], ids=["all", "some", "one"])
def test_microbatches_add_up_as_with_autograd(used: list[tuple[int, ...]]) -> None:
    bench = Bench()
    for task in range(3):
        gradients = bench.gradients()
        for microbatch, positions in enumerate(used):
            bench.backward(10 * task + microbatch, positions)
            gradients.gather()
        assert_same(bench.downloaded(gradients), bench.expected())
    assert bench.buffers.num_made == 1


def test_after_the_first_microbatch_gradients_stay_where_they_are() -> None:
    bench = Bench()
    gradients = bench.gradients()
    bench.backward(0)
    gradients.gather()
    views = [param.grad for param in bench.params]
    bench.backward(1)
    gradients.gather()
    assert all(param.grad is view for param, view in zip(bench.params, views, strict=True))
    bench.downloaded(gradients)
    again = bench.gradients()
    bench.backward(2)
    again.gather()
    assert all(param.grad is view for param, view in zip(bench.params, views, strict=True)), "the buffer came back"


def test_a_hook_that_replaces_a_gradient_is_followed() -> None:
    bench = Bench()
    gradients = bench.gradients()
    bench.backward(0)
    gradients.gather()
    replaced = torch.full((4,), 5.0)
    bench.params[1].grad = replaced
    gradients.gather()
    assert torch.equal(bench.downloaded(gradients)["p1"], replaced)


def test_the_set_of_trained_parameters_may_change_between_tasks() -> None:
    bench = Bench()
    for flags in ((True, True, True), (True, False, True), (False, False, True), (True, True, True)):
        for params in (bench.params, bench.plain):
            for param, flag in zip(params, flags, strict=True):
                param.requires_grad_(flag)
        gradients = bench.gradients()
        bench.backward(3)
        gradients.gather()
        assert_same(bench.downloaded(gradients), bench.expected())


def test_without_gradients_there_is_no_buffer_and_no_download() -> None:
    bench = Bench()
    gradients = bench.gradients()
    gradients.gather()
    assert bench.downloaded(gradients) == {}
    assert bench.buffers.num_made == 0


def test_a_sparse_gradient_is_refused_by_name() -> None:
    bench = Bench()
    gradients = bench.gradients()
    bench.params[0].grad = torch.zeros(3, 4).to_sparse()
    with pytest.raises(UsageError, match=r"'p0' has a torch\.sparse_coo gradient"):
        gradients.gather()
    assert bench.buffers.num_made == 0


def test_dropped_gradients_are_not_downloaded() -> None:
    bench = Bench()
    gradients = bench.gradients()
    bench.backward(0)
    gradients.gather()
    gradients.drop()
    assert bench.downloaded(gradients) == {}
