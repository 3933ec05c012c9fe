"""Invalid arguments of RoundPipe(...): refused before the model is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_input_scene import Scene, assert_same, build, refused
from torch import nn
from torch.nn.parameter import is_lazy

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices import HostPinner
from roundpipe.errors import (
    ArgumentTypeError,
    ConfigError,
    DeviceError,
    HostMemoryError,
    OwnershipError,
    RoundPipeError,
    UsageError,
)
from roundpipe.store.adopt import refuse_owned

pytestmark = pytest.mark.usefixtures("bystander")


def wrap(model: Any, **options: Any) -> RoundPipe:
    return RoundPipe(model, **({"devices": ["cpu"]} | options))


def places(model: nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters() if has_values(param)}


def has_values(param: nn.Parameter) -> bool:
    return param.device.type == "cpu" and param.layout is torch.strided and not is_lazy(param)


def assert_refused_untouched(model: nn.Module, kind: type[RoundPipeError], *fragments: str, **options: Any) -> None:
    """Assert that wrapping is refused and that the parameters keep their memory and values and have no owner."""
    places_before = places(model)
    values_before = {name: param.detach().clone() for name, param in model.named_parameters() if has_values(param)}
    with refused(kind, *fragments):
        wrap(model, **options)
    assert places(model) == places_before
    refuse_owned(model)
    for name, param in model.named_parameters():
        if has_values(param):
            assert torch.equal(param, values_before[name])


def test_what_is_no_module() -> None:
    for model in [None, "resnet", [nn.Linear(2, 2)], nn.Linear, torch.zeros(2)]:
        with refused(ArgumentTypeError, "wraps an nn.Module", type(model).__name__):
            wrap(model)


def test_a_module_class_is_told_to_be_instantiated() -> None:
    with refused(ArgumentTypeError, "class Linear", "Linear(...)"):
        wrap(nn.Linear)


def test_a_roundpipe_in_a_roundpipe(scene: Scene) -> None:
    with refused(UsageError, "is a RoundPipe already", "close() it", ".original_model"):
        wrap(scene.model)


def test_a_roundpipe_as_a_layer(scene: Scene) -> None:
    with refused(UsageError, "'1'", "RoundPipe", "'scene'", "plain module"):
        wrap(nn.Sequential(nn.Linear(4, 4), scene.model))


def test_an_empty_sequential() -> None:
    with refused(ConfigError, "nn.Sequential has no layers", "at least one"):
        wrap(nn.Sequential())


def test_an_optimizer_dtype_that_is_none() -> None:
    for dtype in [torch.int64, torch.bool, "float32", 32, torch.complex64]:
        assert_refused_untouched(
            build(), ArgumentTypeError, "optim_dtype", repr(dtype), "torch.float32", optim_dtype=dtype
        )


def test_a_name_that_is_no_string() -> None:
    for name in [7, b"model", ["a"]]:
        assert_refused_untouched(build(), ArgumentTypeError, "name must be a string", repr(name), name=name)


def test_a_model_config_of_another_type() -> None:
    for config in [None, {"num_microbatch": 4}, 4]:
        assert_refused_untouched(
            build(),
            ArgumentTypeError,
            "model_run_config",
            "RoundPipeRunConfig",
            type(config).__name__,
            model_run_config=config,
        )


def test_an_unknown_pin_mode() -> None:
    for mode in ["pinned", "ALLOC", None, True, ["alloc"]]:
        assert_refused_untouched(
            build(), ConfigError, "pin_model", '"alloc", "register" or "off"', repr(mode), pin_model=mode
        )


FAULTY_DEVICES: list[tuple[Any, type[RoundPipeError], list[str]]] = [
    (["cuda:99"], DeviceError, ["there is no cuda:99", "CUDA device(s) are visible"]),
    ("cuda:99", DeviceError, ["there is no cuda:99"]),
    (["tpu"], DeviceError, ["'tpu'", '"cuda:0"']),
    (["cpu", "cuda:0"], DeviceError, ["mixes CPU and CUDA", "one kind"]),
    ([], DeviceError, ["names no device", "at least one"]),
    (["cpu*0"], DeviceError, ["names no device"]),
    ("", DeviceError, ["''", '"cuda:0"']),
    (["cuda:-1"], DeviceError, ["'cuda:-1'"]),
    (3, ArgumentTypeError, ["must be a list", "got 3"]),
    ([0, 1], ArgumentTypeError, ["0 is neither a string"]),
    (torch.device("cpu"), ArgumentTypeError, ["must be a list", "device(type='cpu')"]),
    ([torch.device("meta")], DeviceError, ["'meta'"]),
]


def test_devices_that_cannot_be() -> None:
    for devices, kind, fragments in FAULTY_DEVICES:
        assert_refused_untouched(build(), kind, *fragments, devices=devices)


def test_an_environment_that_names_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ["cpu*four", "gpu", "cuda:99", "cpu,cuda:0", ","]:
        monkeypatch.setenv("ROUNDPIPE_DEVICES", text)
        assert_refused_untouched(build(), DeviceError, "ROUNDPIPE_DEVICES", text, devices=None)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build()
    assert_refused_untouched(model, ConfigError, "'0.weight'", "meta", "to_empty")


def test_one_layer_on_the_meta_device_leaves_the_others_alone() -> None:
    model = build()
    model[4] = nn.Linear(8, 2, device="meta")
    assert_refused_untouched(model, ConfigError, "'4.weight'", "layer 4", "meta")


def test_a_buffer_on_the_meta_device() -> None:
    model = build()
    model[3].register_buffer("table", torch.zeros(2, device="meta"))
    assert_refused_untouched(model, ConfigError, "buffer '3.table'", "layer 3", "meta")


def test_parameters_that_are_not_initialised_yet() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(2))
    assert_refused_untouched(model, ConfigError, "'1.weight'", "not initialised", "run the model once")


def test_a_buffer_that_is_not_initialised_yet() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(affine=False))
    assert_refused_untouched(model, ConfigError, "'1.running_mean'", "not initialised", "run the model once")


def test_a_sparse_parameter() -> None:
    model = build()
    model[3].register_parameter("table", nn.Parameter(torch.eye(3).to_sparse()))
    assert_refused_untouched(model, ConfigError, "'3.table'", "sparse_coo", "to_dense")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module() -> None:
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    with refused(ConfigError, "layer 1 is a", "TopLevelTracedModule", "plain module"):
        wrap(nn.Sequential(nn.Linear(4, 4), scripted))
    with refused(ConfigError, "submodule '0.1' of layer 0", "plain module"):
        wrap(nn.Sequential(nn.Sequential(nn.Tanh(), scripted)))


def test_a_parameter_of_another_roundpipe(scene: Scene) -> None:
    fresh = nn.Linear(2, 2)
    model = nn.Sequential(fresh, scene.model.model[4])
    assert_refused_untouched(nn.Sequential(fresh), ConfigError, pin_model="none")
    with refused(OwnershipError, "'1.weight'", "(2, 8)", "another RoundPipe", "close"):
        wrap(model)
    refuse_owned(fresh)


def test_a_parameter_is_free_again_after_close() -> None:
    shared = nn.Linear(4, 4)
    first = wrap(shared)
    with refused(OwnershipError, "'0.weight'"):
        wrap(nn.Sequential(shared, nn.Tanh()))
    first.close()
    with wrap(nn.Sequential(shared, nn.Tanh())) as second:
        assert second(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("mode", ["alloc", "register", "off"])
def test_too_little_host_memory(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe.store.host_memory.available_host_bytes", lambda: 100)
    fragments = [
        "does not fit into host memory",
        "gradients",
        "master weights",
        "needed in all",
        "available",
        "missing",
    ]
    assert_refused_untouched(build(), HostMemoryError, *fragments, "requires_grad_(False)", pin_model=mode)


class CountingPinner(HostPinner):
    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, address: int, num_bytes: int) -> bool:
        self.pinned.append(address)
        return True

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


def test_host_memory_that_ends_while_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were moved already keep their values, in unpinned memory, and can be wrapped again."""
    answers = iter([10**9, 10**9, 10**9, 10])
    pinner = CountingPinner()
    model, plain = build(), build()
    with monkeypatch.context() as patch:
        patch.setattr("roundpipe.store.host_memory.available_host_bytes", lambda: next(answers, 10))
        patch.setattr("roundpipe.api.roundpipe.host_pinner", lambda specs: pinner)
        with refused(HostMemoryError, "needed in all", "missing"):
            wrap(model)
    assert pinner.pinned == []
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))
    with wrap(model) as wrapped, torch.no_grad():
        assert torch.equal(wrapped.eval()(torch.ones(1, 4)), plain.eval()(torch.ones(1, 4)))


def test_two_parameters_over_one_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert_refused_untouched(model, ConfigError, "'0.weight'", "'1.weight'", "same memory", "same nn.Parameter")


def test_an_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="num_microbatch"):
        RoundPipe(build(), num_microbatch=4)  # type: ignore[call-arg]


def test_the_module_that_was_refused_can_be_wrapped() -> None:
    model = build()
    assert_refused_untouched(model, ConfigError, pin_model="none")
    with wrap(model, model_run_config=RoundPipeRunConfig(num_microbatch=1)) as wrapped:
        assert wrapped(torch.ones(2, 4)).shape == (2, 2)
