"""A copy of a module tree runs the same code over other parameters or submodules, and never touches its original."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.module_copy import copy_tree, translated


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Outer(nn.Module):
    """Refers to its parts in many ways beside the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.again = self.first
        self.scale = nn.Parameter(torch.rand(3))
        self.nothing = None
        self.register_parameter("bias", None)
        self.in_list = [self.first, "x"]
        self.in_tuple = (self.scale, self.second)
        self.in_dict = {"part": self.second}
        self.numbers = [1, 2]
        self.method = self.run

    def run(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first(x))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


X = torch.arange(6.0).view(2, 3)


def doubled(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach() * 2)


def test_a_copy_is_another_tree_of_the_same_classes_over_the_same_tensors() -> None:
    model = Outer()
    copy, pairs = copy_tree(model)
    assert torch.equal(copy(X), model(X))
    assert [type(module) for module in copy.modules()] == [type(module) for module in model.modules()]
    assert not {id(module) for module in copy.modules()} & {id(module) for module in model.modules()}
    assert [id(p) for p in copy.parameters()] == [id(p) for p in model.parameters()]
    assert [id(b) for b in copy.buffers()] == [id(b) for b in model.buffers()]
    assert {(id(original), id(copied)) for original, copied in pairs} == {
        (id(original), id(copied)) for original, copied in zip(model.modules(), copy.modules(), strict=True)
    }


def test_a_module_that_occurs_twice_is_one_in_the_copy() -> None:
    copy, _ = copy_tree(Outer())
    assert copy.again is copy.first
    assert copy.first is not copy.second


def test_exchanged_parameters_are_used_everywhere() -> None:
    model = Outer()
    model.second.linear.weight = model.first.linear.weight
    copy, _ = copy_tree(model, parameter=doubled)
    assert copy.second.linear.weight is copy.first.linear.weight
    assert copy.in_tuple[0] is copy.scale
    expected = Outer()
    expected.second.linear.weight = expected.first.linear.weight
    with torch.no_grad():
        for param, other in zip(expected.parameters(), model.parameters(), strict=True):
            param.copy_(other * 2)
    assert torch.equal(copy(X), expected(X))


def test_gradients_of_a_copy_stay_with_it() -> None:
    model = Outer()
    copy, _ = copy_tree(model, parameter=lambda param: nn.Parameter(param.detach()))
    copy(X).sum().backward()
    assert all(param.grad is not None for param in copy.parameters())
    assert all(param.grad is None for param in model.parameters())


def test_a_parameter_can_be_left_out() -> None:
    model = Outer()
    copy, _ = copy_tree(model, parameter=lambda param: None if param is model.scale else param)
    assert "scale" not in copy._parameters
    assert copy._parameters["bias"] is None
    assert model.scale is not None


def test_a_stand_in_takes_the_place_of_a_module_with_all_below_it() -> None:
    model = Outer()
    stand_in = nn.Identity()
    copy, pairs = copy_tree(model, lambda module: stand_in if module is model.first else None)
    assert copy.first is copy.again is copy.in_list[0] is stand_in
    assert torch.equal(copy(X), model.second(X) * model.scale)
    assert all(original not in (model.first, model.first.linear) for original, _ in pairs)


def test_a_stand_in_may_be_an_empty_list_of_modules() -> None:
    """Which is false as a truth value."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([Inner()])})
    empty = nn.ModuleList()
    copy, _ = copy_tree(model, lambda module: empty if module is model["blocks"] else None)
    assert copy["blocks"] is empty


def test_attributes_lead_to_the_copys_own_parts() -> None:
    model = Outer()
    copy, _ = copy_tree(model)
    assert copy.in_list[0] is copy.first
    assert copy.in_list[1] == "x"
    assert copy.in_tuple[1] is copy.second
    assert copy.in_dict["part"] is copy.second
    assert copy.method.__self__ is copy
    assert copy.numbers is model.numbers


def test_a_forward_that_is_a_method_of_the_module_itself_is_bound_to_the_copy() -> None:
    model = Inner()
    model.forward = types.MethodType(lambda self, x: self.linear(x) * 3, model)
    copy, _ = copy_tree(model, parameter=doubled)
    assert torch.equal(copy(X), (X @ (2 * model.linear.weight).T + 2 * model.linear.bias) * 3)


def test_hooks_and_modes_are_those_of_the_original() -> None:
    model = Outer().eval()
    model.first.register_forward_hook(lambda module, args, output: output * 5)
    copy, _ = copy_tree(model)
    assert not any(module.training for module in copy.modules())
    assert torch.equal(copy(X), model(X))


def test_changing_a_copy_leaves_the_original_alone() -> None:
    model = Outer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy: Any = copy_tree(model)[0]
    copy.extra = 1
    copy.first.linear = nn.Identity()
    copy.scale = None
    copy.first._buffers["shift"] = torch.zeros(3)
    assert not hasattr(model, "extra")
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_what_refers_to_exchanged_things_is_translated() -> None:
    model, copy, part, new = Inner(), Inner(), nn.Tanh(), nn.Tanh()
    exchanged = {id(part): new}
    assert translated(part, model, copy, exchanged) is new
    assert translated([part, 1], model, copy, exchanged) == [new, 1]
    assert translated({"a": part}, model, copy, exchanged) == {"a": new}
    assert translated(other := nn.Tanh(), model, copy, exchanged) is other
    for untouched in ([1], {"a": 2}, "text", copy.forward):
        assert translated(untouched, model, copy, exchanged) is untouched
