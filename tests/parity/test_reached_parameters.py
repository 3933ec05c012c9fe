"""Training reaches the wrapped model's parameters: what would silently train nothing raises."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from helpers_parity import Models, assert_same, assert_same_grads, batch, microbatches, mse, seeded
from roundpipe import UsageError

WIDTH = 5


def rows() -> Tensor:
    return batch(6, WIDTH)


class InContainers(nn.Module):
    """Calls its linear map through a container that copies of the module share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden = {"one": {"two": self.linear}}

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden["one"]["two"](x).tanh()


def test_a_layer_that_computes_with_the_hosts_parameters_is_refused(models: Models, num_devices: int) -> None:
    model = models.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), InContainers()), num_devices)
    before = [param.clone() for param in model.parameters()]
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"layer 1 has computed with the parameter '1.linear.weight' in host memory"
        ):
            model.forward_backward((rows(),), label=rows(), loss_fn=mse, run_config=microbatches(2))
    assert_same([param.grad for param in model.parameters()], [None] * 4)
    assert_same(list(model.parameters()), before)
    model.model[1].hidden["one"]["two"] = nn.Identity()
    model.forward_backward((rows(),), label=rows(), loss_fn=mse, run_config=microbatches(2))


def test_a_hook_that_computes_with_the_hosts_parameters_is_refused(models: Models) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].register_forward_hook(lambda layer, args, output: output + module[0](args[0]))
    model = models.wrap(module, 2)
    with pytest.raises(UsageError, match=r"layer 1 has computed with the parameter '0.weight'.*or a hook"):
        model(rows())


class Cut(nn.Module):
    """A head whose output does not depend on its input while `is_cut`."""

    is_cut = True

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if self.is_cut else x


NOTHING = "backward has reached none of the 2 parameters that require grad \\('0.weight' is one\\)"


def test_a_first_backward_that_reaches_no_parameter_raises(models: Models, num_devices: int) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Cut()))
    model = models.wrap(module, num_devices)
    config = microbatches(2)
    with pytest.raises(UsageError, match=NOTHING):
        model.forward_backward((rows(),), label=rows(), loss_fn=mse, run_config=config)
    with pytest.raises(UsageError, match=NOTHING):
        model(rows(), roundpipe_run_config=config).sum().backward()
    module[1].is_cut = False
    model.forward_backward((rows(),), label=rows(), loss_fn=mse, run_config=config)
    model.synchronize()
    reference = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Cut()))
    reference[1].is_cut = False
    for x, label in zip(rows().tensor_split(2), rows().tensor_split(2), strict=True):
        mse(reference(x), label).backward()
    assert_same_grads(model.model, reference)


def test_a_later_backward_may_reach_no_parameter(models: Models) -> None:
    """As in a plain model: only a model that has never been trained is suspicious."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Cut())
    module[1].is_cut = False
    model = models.wrap(module, 1)
    model.forward_backward((rows(),), label=rows(), loss_fn=mse)
    module[1].is_cut = True
    model.forward_backward((rows(),), label=rows(), loss_fn=mse)


def test_a_frozen_model_may_be_backpropagated_through(models: Models) -> None:
    model = models.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False), 2)
    x = rows().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
