"""Which submodules wrap_model_to_roundpipe turns into RoundPipes, with which options and names."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import (
    AutoRoundPipe,
    OwnershipError,
    RoundPipe,
    RoundPipeRunConfig,
    UsageError,
    models,
    wrap_model_to_roundpipe,
)
from roundpipe import models as registry

LINEAR_4 = 4 * 4 * 4 + 4 * 4  # bytes of nn.Linear(4, 4): 80
DEVICES = ["cpu"] * 2

Wrapped = RoundPipe | AutoRoundPipe


class Host(nn.Module):
    """Runs its children in their order, and the elements of a ModuleList in theirs."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            for module in child if isinstance(child, nn.ModuleList) else [child]:
                x = module(x)
        return x


class WithWeight(nn.Module):
    """Has a parameter beside a child module."""

    def __init__(self, num_own: int, child: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_own))
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.weight.sum()


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


@pytest.fixture
def opened() -> Iterator[list[Wrapped]]:
    models: list[Wrapped] = []
    yield models
    for model in models:
        model.close()


@pytest.fixture
def wrap(opened: list[Wrapped]) -> Any:
    """wrap_model_to_roundpipe on two virtual devices, with thresholds that make several Linears separate parts."""

    def wrap(model: nn.Module, **options: Any) -> Wrapped:
        options = {"lower_threshold": LINEAR_4, "upper_threshold": LINEAR_4, "devices": DEVICES} | options
        opened.append(wrap_model_to_roundpipe(model, **options))
        return opened[-1]

    return wrap


def parts_of(model: Wrapped) -> dict[str, RoundPipe]:
    return {path: module for path, module in model.model.named_modules() if isinstance(module, RoundPipe)}


def runs(model: Wrapped, reference: nn.Module) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), reference(x))


# The rules, in their order.


def test_a_skipped_module_is_left_alone(wrap: Any) -> None:
    model = Host(a=linear(), b=linear())
    plain = model.b
    wrapped = wrap(model, skip_modules=[plain])
    assert list(parts_of(wrapped)) == ["a"]
    assert model.b is plain


def test_any_container_of_modules_can_be_skipped(wrap: Any) -> None:
    class OnlyContains:
        def __contains__(self, module: object) -> bool:
            return module is model.a

    model = Host(a=linear(), b=linear())
    assert list(parts_of(wrap(model, skip_modules=OnlyContains()))) == ["b"]


def test_a_skipped_root_runs_on_the_host_and_still_trains(wrap: Any) -> None:
    model = Host(a=linear())
    wrapped = wrap(model, skip_modules=[model])
    assert isinstance(wrapped, AutoRoundPipe)
    assert parts_of(wrapped) == {}
    assert [name for name, _ in wrapped.optim_named_parameters()] == ["a.weight", "a.bias"]


def test_a_sequential_has_a_layer_per_child_whatever_its_size(wrap: Any) -> None:
    model = Host(small=nn.Sequential(nn.Tanh(), nn.Tanh()), large=nn.Sequential(*[linear() for _ in range(5)]))
    parts = parts_of(wrap(model))
    assert {path: part.num_layers for path, part in parts.items()} == {"small": 2, "large": 5}
    assert {part.model_run_config for part in parts.values()} == {RoundPipeRunConfig()}


def test_an_empty_sequential_stays_as_it_is(wrap: Any) -> None:
    model = Host(nothing=nn.Sequential(), a=linear(), b=nn.ModuleList([nn.Sequential(), linear()]))
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert list(parts_of(wrapped)) == ["a", "b.1"]
    runs(wrapped, reference)


def test_a_sequential_with_a_forward_of_its_own_is_one_layer(wrap: Any) -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = Host(twice=Twice(linear()), b=linear())
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert parts_of(wrapped)["twice"].num_layers == 1
    runs(wrapped, reference)


@pytest.mark.parametrize(("num_own", "whole"), [(3, False), (4, True), (5, True)])
def test_own_parameters_from_the_lower_threshold_on_make_a_whole(wrap: Any, num_own: int, whole: bool) -> None:
    model = Host(a=WithWeight(num_own, linear()), b=linear())
    parts = parts_of(wrap(model, lower_threshold=16, upper_threshold=LINEAR_4))
    assert list(parts) == (["a", "b"] if whole else ["a.child", "b"])


@pytest.mark.parametrize(("upper", "whole"), [(2 * LINEAR_4 - 1, False), (2 * LINEAR_4, True)])
def test_a_module_up_to_the_upper_threshold_is_a_whole(wrap: Any, upper: int, whole: bool) -> None:
    model = Host(a=Host(x=linear(), y=linear()), b=linear(), c=linear())
    parts = parts_of(wrap(model, upper_threshold=upper, lower_threshold=1000))
    assert list(parts) == (["a", "b", "c"] if whole else ["a.x", "a.y", "b", "c"])
    assert all(part.num_layers == 1 for part in parts.values())


@pytest.mark.parametrize(("lower", "num_microbatch"), [(LINEAR_4, None), (LINEAR_4 + 1, 1)])
def test_a_whole_below_the_lower_threshold_runs_in_one_microbatch(
    wrap: Any, lower: int, num_microbatch: int | None
) -> None:
    parts = parts_of(wrap(Host(a=linear(), b=nn.Tanh(), c=linear()), lower_threshold=lower))
    assert parts["a"].model_run_config == RoundPipeRunConfig(num_microbatch=num_microbatch)
    assert parts["b"].model_run_config == RoundPipeRunConfig(num_microbatch=1)


def test_one_microbatch_for_small_modules_goes_over_the_models_own_number(wrap: Any) -> None:
    model = Host(a=linear(), b=nn.Tanh(), c=nn.ReLU(), d=linear())
    everywhere, special = RoundPipeRunConfig(num_microbatch=4), RoundPipeRunConfig(num_microbatch=2)
    parts = parts_of(wrap(model, model_run_config=everywhere, override_config={model.c: special}))
    assert [part.model_run_config.num_microbatch for part in parts.values()] == [4, 1, 2, 4]


def test_a_module_without_forward_is_never_a_whole(wrap: Any) -> None:
    model = Host(a=nn.ModuleList([linear()]), d=nn.ModuleDict({"x": linear(), "y": linear()}))
    assert list(parts_of(wrap(model, upper_threshold=2 * LINEAR_4))) == ["a.0", "d.x", "d.y"]


def test_a_forward_set_on_the_instance_counts(wrap: Any) -> None:
    bare = nn.Module()
    bare.layer = linear()
    bare.forward = lambda x: bare.layer(x)
    model = Host(a=bare, b=linear(), c=linear())
    assert list(parts_of(wrap(model))) == ["a", "b", "c"]


def test_elements_of_a_module_list_hand_packed_microbatches_on_but_for_the_last(wrap: Any) -> None:
    parts = parts_of(wrap(Host(list=nn.ModuleList([linear(), nn.Sequential(linear(), linear()), linear()]))))
    assert [part.model_run_config for part in parts.values()] == [
        RoundPipeRunConfig(merge_output=False),
        RoundPipeRunConfig(merge_output=False),
        RoundPipeRunConfig(),
    ]
    assert [part.num_layers for part in parts.values()] == [1, 2, 1]


def test_elements_of_a_module_list_are_wholes_whatever_their_size(wrap: Any) -> None:
    model = Host(list=nn.ModuleList([Host(x=linear(), y=linear()), nn.Tanh()]))
    assert list(parts_of(wrap(model, upper_threshold=0))) == ["list.0", "list.1"]


def test_the_users_config_of_an_element_wins(wrap: Any) -> None:
    model = Host(list=nn.ModuleList([linear(), linear(), linear()]))
    merged = RoundPipeRunConfig(merge_output=True)
    parts = parts_of(
        wrap(model, override_config={model.list[0]: merged}, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    )
    assert [part.model_run_config.merge_output for part in parts.values()] == [True, False, None]
    assert {part.model_run_config.num_microbatch for part in parts.values()} == {3}


def test_an_element_before_a_skipped_one_merges(wrap: Any) -> None:
    model = Host(list=nn.ModuleList([linear(), linear(), linear(), linear()]))
    reference = copy.deepcopy(model)
    wrapped = wrap(model, skip_modules=[model.list[2]])
    assert {path: part.model_run_config.merge_output for path, part in parts_of(wrapped).items()} == {
        "list.0": False,
        "list.1": None,
        "list.3": None,
    }
    runs(wrapped, reference)


def test_an_element_that_occurs_twice_is_one_roundpipe_that_merges(wrap: Any) -> None:
    layer = linear()
    model = Host(list=nn.ModuleList([layer, layer]), b=linear())
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert model.list[0] is model.list[1]
    assert model.list[0].model_run_config.merge_output is None
    runs(wrapped, reference)


def test_nested_lists_and_modules_are_descended_into(wrap: Any) -> None:
    model = Host(a=Host(x=linear(), list=nn.ModuleList([linear()])), b=nn.ModuleList([nn.ModuleList([linear()])]))
    assert list(parts_of(wrap(model))) == ["a.x", "a.list.0", "b.0.0"]


@pytest.mark.parametrize(("num_devices", "wholes"), [(1, ["a", "b", "c"]), (2, ["a.x", "a.y", "b", "c"])])
def test_the_upper_threshold_is_the_models_size_over_devices_and_one(
    wrap: Any, num_devices: int, wholes: list[str]
) -> None:
    model = Host(a=Host(x=linear(), y=linear()), b=linear(), c=linear())
    options = {"upper_threshold": None, "lower_threshold": 1000, "devices": ["cpu"] * num_devices}
    assert list(parts_of(wrap(model, **options))) == wholes


# What comes back.


def test_a_root_that_is_wrapped_directly_is_a_roundpipe(wrap: Any) -> None:
    for model in (nn.Sequential(linear(), linear()), WithWeight(100, linear()), linear()):
        wrapped = wrap(model)
        assert type(wrapped) is RoundPipe
        assert wrapped.model is model


def test_a_root_in_parts_is_an_autoroundpipe_over_the_model_itself(wrap: Any) -> None:
    model = Host(a=linear(), b=linear())
    wrapped = wrap(model)
    assert type(wrapped) is AutoRoundPipe
    assert wrapped.model is model
    assert not isinstance(wrapped, RoundPipe)


def test_override_config_of_a_root(wrap: Any) -> None:
    model = nn.Sequential(linear())
    wrapped = wrap(model, override_config={model: RoundPipeRunConfig(num_microbatch=7)})
    assert wrapped.model_run_config.num_microbatch == 7


def test_parts_are_named_below_the_model(wrap: Any) -> None:
    model = Host(a=linear(), b=Host(list=nn.ModuleList([linear(), linear()])))
    wrapped = wrap(model, name="net")
    assert wrapped.name == "net"
    assert [part.name for part in parts_of(wrapped).values()] == ["net.a", "net.b.list.0", "net.b.list.1"]


def test_the_name_is_the_call_site_by_default() -> None:
    with wrap_model_to_roundpipe(Host(a=linear(), b=linear()), devices=DEVICES) as wrapped:
        assert wrapped.name.startswith(os.path.basename(__file__) + ":")
    with wrap_model_to_roundpipe(nn.Sequential(linear()), devices=DEVICES) as wrapped:
        assert wrapped.name.startswith(os.path.basename(__file__) + ":")


def test_roundpipe_options_reach_every_part_and_what_is_outside(wrap: Any) -> None:
    model = WithWeight(2, Host(a=linear(), b=linear())).bfloat16()
    wrapped = wrap(model, optim_dtype=torch.float64, pin_model="off", devices=["cpu"] * 3, lower_threshold=1000)
    assert {param.dtype for param in wrapped.optim_parameters()} == {torch.float64}
    assert all("devices=3" in part.extra_repr() for part in parts_of(wrapped).values())


# Shared parameters.


def test_modules_that_share_a_parameter_are_wrapped_with_their_common_parent(
    wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tied = Host(x=linear(), y=linear(), z=linear())
    tied.z.weight = tied.x.weight
    model = Host(a=linear(), tied=tied)
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert {path: part.num_layers for path, part in parts_of(wrapped).items()} == {"a": 1, "tied": 1}
    assert "'tied.x.weight' and 'tied.z.weight'" in caplog.text
    runs(wrapped, reference)


def test_a_parameter_shared_across_the_whole_model_makes_one_layer_of_it(wrap: Any) -> None:
    model = Host(a=linear(), list=nn.ModuleList([linear(), linear()]))
    model.list[1].weight = model.a.weight
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert type(wrapped) is RoundPipe
    assert wrapped.num_layers == 1
    runs(wrapped, reference)


def test_sharing_inside_a_list_is_settled_by_the_module_around_it(wrap: Any) -> None:
    model = Host(inner=Host(list=nn.ModuleList([linear(), linear()])), b=linear())
    model.inner.list[1].weight = model.inner.list[0].weight
    assert list(parts_of(wrap(model))) == ["inner", "b"]


def test_a_parameter_of_a_module_on_the_host_and_of_its_child_makes_one_layer(wrap: Any) -> None:
    model = Host(a=WithWeight(4, linear()), b=linear())
    model.a.child.bias = model.a.weight
    assert list(parts_of(wrap(model, lower_threshold=1000))) == ["a", "b"]


def test_sharing_between_modules_on_the_host_is_nobodys_business(wrap: Any) -> None:
    model = Host(a=linear(), b=linear(), c=linear())
    model.b.weight = model.a.weight
    wrapped = wrap(model, skip_modules=[model.a, model.b])
    assert list(parts_of(wrapped)) == ["c"]
    assert [name for name, _ in wrapped.optim_named_parameters()] == [
        "a.weight",
        "a.bias",
        "b.bias",
        "c.weight",
        "c.bias",
    ]


def test_a_skipped_module_that_shares_with_a_wrapped_one_is_refused(wrap: Any) -> None:
    model = Host(a=linear(), b=linear(), c=linear())
    model.b.weight = model.a.weight
    with pytest.raises(OwnershipError, match=r"'a.weight' and 'b.weight' are one parameter.*'b'.*skip"):
        wrap(model, skip_modules=[model.b])
    assert type(model.a) is nn.Linear


def test_sharing_that_no_forward_contains_is_refused(wrap: Any) -> None:
    model = nn.ModuleList([linear(), linear()])
    model[1].weight = model[0].weight
    with pytest.raises(OwnershipError, match=r"'0.weight' and '1.weight'"):
        wrap(model)


def test_a_module_that_occurs_in_two_places_is_one_roundpipe(wrap: Any) -> None:
    shared = linear()
    model = Host(a=Host(x=shared, y=linear()), b=Host(x=shared, y=linear()))
    reference = copy.deepcopy(model)
    wrapped = wrap(model)
    assert model.a.x is model.b.x
    assert len(parts_of(wrapped)) == 3
    runs(wrapped, reference)


# Presets.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.size = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.fixture(autouse=True)
def no_presets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_presets", {})


def convert_pair(pair: Pair) -> nn.Sequential:
    return nn.Sequential(pair.first, nn.Tanh(), pair.second)


@pytest.mark.parametrize("use_sequential_preset", [None, True])
def test_a_preset_makes_a_roundpipe_that_looks_like_the_original(
    wrap: Any, caplog: pytest.LogCaptureFixture, use_sequential_preset: bool | None
) -> None:
    models.register(Pair, convert_pair)
    pair = Pair()
    reference = copy.deepcopy(pair)
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        wrapped = wrap(
            pair,
            use_sequential_preset=use_sequential_preset,
            model_run_config=RoundPipeRunConfig(num_microbatch=5),
            override_config={pair: RoundPipeRunConfig(recompute_grain="layer")},
        )
    assert type(wrapped) is RoundPipe
    assert wrapped.num_layers == 3
    assert wrapped.original_model is pair
    assert wrapped.size == 4
    assert list(wrapped.state_dict()) == list(reference.state_dict())
    assert wrapped.model_run_config == RoundPipeRunConfig(num_microbatch=5, recompute_grain="layer")
    assert ("preset for Pair" in caplog.text) == (use_sequential_preset is None)
    runs(wrapped, reference)


def test_presets_can_be_ignored(wrap: Any) -> None:
    models.register(Pair, convert_pair)
    assert type(wrap(Pair(), use_sequential_preset=False)) is AutoRoundPipe


def test_a_preset_that_must_be_there_and_is_not(wrap: Any) -> None:
    with pytest.raises(NotImplementedError, match="no preset for Pair"):
        wrap(Pair(), use_sequential_preset=True)


def test_register_decorates_and_a_preset_is_of_one_class_only() -> None:
    class Child(Pair):
        pass

    @models.register(Pair)
    def convert(pair: Pair) -> nn.Sequential:
        return convert_pair(pair)

    assert models.find_preset(Pair()) is convert
    assert models.find_preset(Child()) is None


@pytest.mark.parametrize("arguments", [(3,), (int, convert_pair), (Pair, 3)])
def test_register_refuses_nonsense(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="preset"):
        models.register(*arguments)


@pytest.mark.parametrize(
    ("convert", "error"),
    [
        (lambda pair: pair, "must return an nn.Sequential, got Pair"),
        (lambda pair: nn.Sequential(pair.first), "second.weight"),
        (lambda pair: nn.Sequential(pair.first, pair.second, linear()), "6 instead of 4"),
    ],
)
def test_a_preset_that_loses_or_adds_parameters_is_refused(wrap: Any, convert: Any, error: str) -> None:
    models.register(Pair, convert)
    with pytest.raises((TypeError, ValueError), match=error):
        wrap(Pair())


# Refused.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lower_threshold": 1.5}, TypeError, "lower_threshold must be a number of bytes"),
        ({"upper_threshold": True}, TypeError, "upper_threshold"),
        ({"upper_threshold": -1}, ValueError, "upper_threshold must not be negative"),
        ({"use_sequential_preset": "llama"}, TypeError, "use_sequential_preset"),
        ({"skip_modules": 3}, TypeError, "skip_modules must be a list"),
        ({"override_config": [1]}, TypeError, "override_config must be a dict"),
        ({"override_config": {"a": RoundPipeRunConfig()}}, TypeError, "must map modules"),
        ({"model_run_config": {}}, TypeError, "model_run_config"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"optim_type": torch.float32}, TypeError, "'optim_type'.*optim_dtype"),
        ({"optim_dtype": torch.int8}, TypeError, "optim_dtype"),
        ({"pin_model": "yes"}, ValueError, "pin_model"),
    ],
)
def test_bad_arguments(wrap: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Host(a=linear(), b=linear())
    with pytest.raises(error, match=message):
        wrap(model, **options)
    assert type(model.a) is nn.Linear


def test_something_that_is_no_module() -> None:
    with pytest.raises(TypeError, match="wraps an nn"):
        wrap_model_to_roundpipe("model")  # type: ignore[arg-type]


def test_a_wrapped_model_is_not_wrapped_again(wrap: Any) -> None:
    wrapped = wrap(Host(a=linear(), b=linear()))
    with pytest.raises(UsageError, match="AutoRoundPipe already"):
        wrap(wrapped)
    with pytest.raises(UsageError, match="'a' of the model is a RoundPipe already"):
        wrap(wrapped.model)


def test_what_belongs_to_another_roundpipe_is_refused_and_nothing_is_changed(wrap: Any) -> None:
    model = Host(a=linear(), b=linear())
    other = wrap(model.b)
    with pytest.raises(OwnershipError, match=r"'b.weight'"):
        wrap(model)
    other.close()
    assert type(wrap(model)) is AutoRoundPipe


def test_a_failure_half_way_leaves_the_model_plain_and_free(wrap: Any) -> None:
    model = Host(a=linear(), b=linear().to("meta"))
    with pytest.raises(ValueError, match="meta"):
        wrap(model)
    assert type(model.a) is nn.Linear
    model.b = linear()
    assert type(wrap(model)) is AutoRoundPipe


def test_what_cannot_come_true_is_said(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Host(a=nn.Sequential(linear(), linear()), b=linear())
    config = RoundPipeRunConfig(num_microbatch=2)
    wrap(model, skip_modules=[model.a[0]], override_config={model: config, linear(): config})
    assert "'a.0' is in skip_modules but inside 'a'" in caplog.text
    assert "override_config of 'the model' is not used" in caplog.text
    assert "override_config of 'a Linear outside the model'" in caplog.text
