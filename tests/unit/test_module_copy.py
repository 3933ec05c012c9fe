"""A copy of a module tree runs the same code over other parameters or submodules; the original does not change."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.module_copy import ModulePair, copy_tree, translated


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Outer(nn.Module):
    """Refers to its parts in attributes of many kinds, besides as submodules."""

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
    assert {(id(pair.original), id(pair.copy)) for pair in pairs} == {
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


def test_a_stand_in_replaces_a_module_and_everything_below_it() -> None:
    model = Outer()
    stand_in = nn.Identity()
    copy, pairs = copy_tree(model, lambda module: stand_in if module is model.first else None)
    assert copy.first is copy.again is copy.in_list[0] is stand_in
    assert torch.equal(copy(X), model.second(X) * model.scale)
    assert all(pair.original not in (model.first, model.first.linear) for pair in pairs)


def test_a_stand_in_may_be_an_empty_list_of_modules() -> None:
    """An empty ModuleList is false, so the code must compare with None."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([Inner()])})
    empty = nn.ModuleList()
    copy, _ = copy_tree(model, lambda module: empty if module is model["blocks"] else None)
    assert copy["blocks"] is empty


def test_attributes_of_a_copy_refer_to_the_parts_of_the_copy() -> None:
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


def with_closure(model: Inner) -> None:
    old, linear = model.forward, model.linear

    def forward(x: Tensor) -> Tensor:
        return old(x) + linear(x)

    model.forward = forward


def with_nested_closures(model: Inner) -> None:
    old = model.forward

    def twice(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: forward(forward(x))

    model.forward = twice(old)


def with_method_around_the_old_one(model: Inner) -> None:
    old = model.forward

    def forward(self: Inner, x: Tensor) -> Tensor:
        return old(x) * self.linear.bias

    model.forward = types.MethodType(forward, model)


def with_partial(model: Inner) -> None:
    def forward(old: Callable[[Tensor], Tensor], x: Tensor, *, linear: nn.Module) -> Tensor:
        return old(x) - linear(x)

    model.forward = functools.partial(forward, model.forward, linear=model.linear)


def with_method_of_a_submodule(model: Inner) -> None:
    model.forward = model.linear.forward


def with_decorator(model: Inner) -> None:
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)


REPLACED = (
    with_closure,
    with_nested_closures,
    with_method_around_the_old_one,
    with_partial,
    with_method_of_a_submodule,
    with_decorator,
)


@pytest.mark.parametrize("replace", REPLACED)
def test_a_forward_replaced_on_the_instance_runs_the_modules_of_the_copy(replace: Callable[[Inner], None]) -> None:
    torch.manual_seed(2)
    model = Inner()
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for param in expected.parameters():
            param.mul_(2)
    replace(model)
    replace(expected)
    found, _ = copy_tree(model, parameter=doubled)
    assert torch.equal(found(X), expected(X))
    found(X).sum().backward()
    assert all(param.grad is None for param in model.parameters())


def test_functions_of_a_copy_share_what_is_not_exchanged() -> None:
    model, calls = Inner(), 0
    old = model.forward

    def forward(x: Tensor, *, scale: float = 2.0) -> Tensor:
        nonlocal calls
        calls += 1
        return old(x) * scale

    forward.mark = "kept"
    model.forward = forward
    found: Any = copy_tree(model)[0]
    found(X)
    model(X)
    assert calls == 2
    assert found.forward.mark == "kept"
    assert (found.forward.__name__, found.forward.__kwdefaults__) == ("forward", {"scale": 2.0})


def test_a_function_that_refers_to_itself_is_translated() -> None:
    model = Inner()
    linear = model.linear

    def forward(x: Tensor, depth: int = 2) -> Tensor:
        return linear(x) if depth == 0 else forward(x, depth - 1)

    model.forward = forward
    found, _ = copy_tree(model, parameter=doubled)
    assert torch.equal(found(X), nn.functional.linear(X, 2 * linear.weight, 2 * linear.bias))


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


def test_only_attributes_that_refer_to_exchanged_objects_are_translated() -> None:
    copy, part, new = Inner(), nn.Tanh(), nn.Tanh()
    exchanged = {id(part): new}
    assert translated(part, exchanged) is new
    assert translated([part, 1], exchanged) == [new, 1]
    assert translated({"a": part}, exchanged) == {"a": new}
    assert translated(other := nn.Tanh(), exchanged) is other
    for untouched in ([1], {"a": 2}, "text", copy.forward):
        assert translated(untouched, exchanged) is untouched


# Following attributes.


def pair_of(model: nn.Module, **options: Any) -> ModulePair:
    copy, pairs = copy_tree(model, **options)
    return next(pair for pair in pairs if pair.copy is copy)


def test_sync_copies_changed_new_and_deleted_attributes() -> None:
    model: Any = Outer()
    pair = pair_of(model)
    copy: Any = pair.copy
    assert not pair.sync()
    model.numbers, model.extra = [3], "new"
    del model.in_dict
    model.in_list = [model.second]
    assert pair.sync()
    assert copy.numbers is model.numbers
    assert copy.extra == "new"
    assert not hasattr(copy, "in_dict")
    assert copy.in_list[0] is copy.second is not model.second
    assert not pair.sync()


def test_sync_leaves_what_the_copy_has_set_unless_the_original_changes() -> None:
    model: Any = Outer()
    pair = pair_of(model)
    copy: Any = pair.copy
    copy.numbers, copy.cache = [9], torch.ones(1)
    model.extra = 1
    pair.sync()
    assert copy.numbers == [9]
    assert hasattr(copy, "cache")
    model.numbers = [4]
    pair.sync()
    assert copy.numbers == [4]


def test_names_that_are_not_followed_are_neither_copied_nor_written_back() -> None:
    model: Any = Outer()
    pair = pair_of(model, not_followed=frozenset(("training",)))
    copy: Any = pair.copy
    assert "training" not in copy.__dict__
    copy.training = False
    model.eval().train()
    pair.sync()
    pair.write_back()
    pair.drop_changes()
    assert not copy.training
    assert model.training


def test_plain_values_go_back_to_the_original_and_others_stay_with_the_copy() -> None:
    model: Any = Outer()
    pair = pair_of(model)
    copy: Any = pair.copy
    copy.count, copy.cache = 1, torch.ones(1)
    pair.write_back()
    assert model.count == 1
    assert not hasattr(model, "cache")
    copy.count = 2
    pair.drop_changes()
    assert copy.count == 1
    assert hasattr(copy, "cache")
    copy.other = "new"
    pair.drop_changes()
    assert not hasattr(copy, "other")


def test_a_flag_that_is_set_and_reset_goes_back_each_time() -> None:
    model: Any = Outer()
    model.flag = False
    pair = pair_of(model)
    copy: Any = pair.copy
    for flag in (False, True, False, False, True):
        pair.sync()
        pair.write_back()
        copy.flag = flag
        pair.write_back()
        assert model.flag is flag


def test_a_value_the_user_resets_after_it_was_written_back_reaches_the_copy() -> None:
    model: Any = Outer()
    model.flag = False
    pair = pair_of(model)
    copy: Any = pair.copy
    copy.flag = True
    pair.write_back()
    model.flag = False
    pair.sync()
    assert copy.flag is False
    copy.flag = True
    pair.drop_changes()
    assert copy.flag is False


def test_a_snapshot_does_not_keep_a_replaced_cache_alive() -> None:
    pair = pair_of(Outer())
    copy: Any = pair.copy
    copy.cache = torch.ones(1)
    pair.drop_changes()
    reference = weakref.ref(copy.cache)
    copy.cache = None
    assert reference() is None


def test_changed_parts_are_named() -> None:
    model: Any = Outer()
    pair = pair_of(model)
    assert pair.changed_parts() == []
    model.scale = nn.Parameter(torch.ones(3))
    model.third = nn.Tanh()
    del model.again
    assert pair.changed_parts() == ["again", "scale", "third"]


def test_a_wrapper_is_left_out_of_the_copy() -> None:
    model: Any = nn.ModuleDict({"wrapper": nn.ModuleDict({"inner": Inner()})})
    inner = model["wrapper"]["inner"]
    copy, pairs = copy_tree(model, unwrap=lambda module: inner if module is model["wrapper"] else module)
    assert type(copy["wrapper"]) is Inner
    assert [pair.original for pair in pairs if pair.copy is copy["wrapper"]] == [inner]


def test_compiled_code_is_not_copied() -> None:
    model: Any = Inner()
    model._compiled_call_impl = lambda *args: 1 / 0
    assert torch.equal(copy_tree(model)[0](X), model.forward(X))
