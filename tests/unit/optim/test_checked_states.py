"""What Adam remembers of checked states changes no result: steps are the same as with a check in every step."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import adam_numbers
from roundpipe import RoundPipe, optim
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store.values import WholeMaster

WIDTH, NUM_STEPS = 16, 6


class Training:
    """A small bfloat16 model and its optimizer; `checks_always` forgets checked states before every step."""

    def __init__(self, *, checks_always: bool, is_async: bool) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(torch.bfloat16)
        self.model = RoundPipe(net, optim_dtype=torch.float32, devices=["cpu"])
        self.optimizer = optim.AdamW(self.model.optim_parameters(), lr=1e-2)
        self._checks_always, self._is_async = checks_always, is_async

    def step(self, seed: int) -> None:
        if self._checks_always:
            self.optimizer._checked = None
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self.model.forward_backward((x,), label=x, loss_fn=lambda out, label: (out - label).float().pow(2).mean())
        self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad())[0], is_async=self._is_async)
        self.model.synchronize()

    def result(self) -> list[Tensor]:
        copies = [param.detach().clone() for param in self.model.optim_parameters()]
        moments = [
            value.clone() for state in self.optimizer.state.values() for value in state.values() if value.numel() > 1
        ]
        return copies + moments + [param.detach().clone() for param in self.model.parameters()]


def replace_moments(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


def move_moments(training: Training) -> None:
    """As code that offloads optimizer state does: the tensors stay, their memory changes."""
    for state in training.optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def reload_state(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def read_values(training: Training) -> None:
    """Gives the copies memory, which they give back later."""
    training.kept = [param.detach() for param in training.model.optim_parameters()]  # type: ignore[attr-defined]


def write_weights(training: Training) -> None:
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(0.5)


def change_options(training: Training) -> None:
    training.optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1, maximize=True)


CHANGES: dict[str, Callable[[Training], None]] = {
    "none": lambda training: None,
    "moments replaced": replace_moments,
    "moments moved": move_moments,
    "state reloaded": reload_state,
    "values read": read_values,
    "weights written": write_weights,
    "options changed": change_options,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("change", CHANGES)
def test_steps_after_a_change_are_those_of_a_check_in_every_step(change: str, is_async: bool) -> None:
    results = []
    for checks_always in (False, True):
        training = Training(checks_always=checks_always, is_async=is_async)
        for seed in range(NUM_STEPS):
            if seed == NUM_STEPS // 2:
                CHANGES[change](training)
            training.step(seed)
        results.append(training.result())
        training.model.close()
    assert all(map(torch.equal, *results))


def test_a_state_of_another_shape_is_refused_although_the_one_before_was_checked() -> None:
    training = Training(checks_always=False, is_async=False)
    training.step(0)
    training.step(1)
    training.optimizer.state[next(iter(training.model.optim_parameters()))]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RuntimeError):
        training.step(2)
    training.model.close()


def test_an_optimizer_keeps_no_weights_and_no_gradients_of_a_model_alive() -> None:
    training = Training(checks_always=False, is_async=False)
    training.step(0)
    training.step(1)
    store = training.model._engine.store
    gone = [weakref.ref(buffer) for buffer in store.landing_buffers._all] + [weakref.ref(store)]
    views = [
        weakref.ref(view) for buffer in store.landing_buffers._all for _, vs in buffer._views.values() for view in vs
    ]
    optimizer = training.optimizer
    training.model.close()
    del training, store
    gc.collect()
    assert [reference() for reference in gone + views] == [None] * len(gone + views)
    assert len(optimizer.state) == 6


# KernelParameter.


@pytest.fixture
def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None, "the tests need a C compiler"
    return made


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_renewed_kernel_parameter_updates_as_a_new_one(kernel: OnePassKernel) -> None:
    results: list[list[Tensor]] = []
    for is_renewed in (False, True):
        masters, moments = [tensors(0), tensors(0)], [torch.zeros(4, 6), torch.zeros(4, 6)]
        weights = [torch.empty(4, 6, dtype=torch.bfloat16) for _ in range(2)]
        parameter: KernelParameter | None = None
        for step in range(1, 5):
            args: Any = (WholeMaster(masters[step % 2]), tensors(step, torch.bfloat16))
            if parameter is None or not is_renewed:
                parameter = KernelParameter(*args, moments, weights[step % 2], adam_numbers(step))
            else:
                assert parameter.renew(*args, weights[step % 2], adam_numbers(step))
            kernel.update([parameter])
            parameter.forget_memory()
        results.append([*masters, *moments, *weights])
    assert all(map(torch.equal, *results))


OTHERS: dict[str, tuple[Any, ...]] = {
    "gradient in another dtype": (tensors(0), tensors(1, torch.float16), tensors(2, torch.bfloat16)),
    "gradient in another shape": (tensors(0), torch.zeros(6, 4, dtype=torch.bfloat16), tensors(2, torch.bfloat16)),
    "gradient in another order": (
        tensors(0),
        torch.zeros(6, 4, dtype=torch.bfloat16).t(),
        tensors(2, torch.bfloat16),
    ),
    "weight in another dtype": (tensors(0), tensors(1, torch.bfloat16), tensors(2)),
    "no weight": (tensors(0), tensors(1, torch.bfloat16), None),
    "master with gaps": (torch.zeros(4, 12)[:, ::2], tensors(1, torch.bfloat16), tensors(2, torch.bfloat16)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_forms_take_a_new_kernel_parameter(kernel: OnePassKernel, other: str) -> None:
    moments = [torch.zeros(4, 6) for _ in range(2)]
    parameter = KernelParameter(
        tensors(0), tensors(1, torch.bfloat16), moments, tensors(2, torch.bfloat16), adam_numbers(1)
    )
    assert not parameter.renew(
        WholeMaster(tensors(0)), tensors(1, torch.bfloat16), tensors(2, torch.bfloat16), adam_numbers(2)
    ), "unchecked"
    kernel.update([parameter])
    master, *others = OTHERS[other]
    assert not parameter.renew(WholeMaster(master), *others, adam_numbers(2))
    assert parameter.renew(
        WholeMaster(tensors(3)), tensors(4, torch.bfloat16), tensors(5, torch.bfloat16), adam_numbers(2)
    )


def test_torch_updates_copies_whose_gradients_the_kernel_cannot_read() -> None:
    """A float64 model with a float32 optimizer: the numbers are those of torch's optimizer on float32 masters."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    masters = [nn.Parameter(param.detach().float()) for param in net.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    model = RoundPipe(nn.Sequential(net), optim_dtype=torch.float32, devices=["cpu"])
    optimizer = optim.AdamW(model.optim_parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        model.forward_backward((x,), label=x, loss_fn=lambda out, label: (out - label).pow(2).mean())
        model.synchronize()
        for master, param in zip(masters, model.optim_parameters(), strict=True):
            master.grad = param.grad.clone()
        reference.step()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad())[0], is_async=False)
    assert all(map(torch.equal, model.optim_parameters(), masters))
    model.close()
