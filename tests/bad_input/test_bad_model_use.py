"""A wrapped model that is moved, cast, copied, rebuilt, or used after close()."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import Scene, build, refused
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ArgumentTypeError, ClosedError, ModelChangedError, UsageError


def test_moving_and_casting_the_wrapper(scene: Scene) -> None:
    model = scene.model
    ways: list[Callable[[], Any]] = [
        lambda: model.to("cuda"),
        lambda: model.to(torch.float16),
        lambda: model.to("cpu", torch.float16),
        lambda: model.to(torch.zeros(1, dtype=torch.float64)),
        lambda: model.to(dtype=torch.bfloat16),
        lambda: model.to(device="cuda:0"),
        model.cuda,
        model.half,
        model.double,
        model.bfloat16,
        lambda: model.to_empty(device="cpu"),
        lambda: model.type(torch.float64),
        model.share_memory,
    ]
    for way in ways:
        with refused(UsageError, "cannot be moved or cast", "before wrapping", "devices=", "optim_dtype"):
            way()


def test_moving_the_wrapper_to_where_it_is(scene: Scene) -> None:
    model = scene.model
    for same in (model.to("cpu"), model.to(torch.device("cpu")), model.to(device="cpu"), model.cpu()):
        assert same is model


def test_compiling_the_wrapper(scene: Scene) -> None:
    model = scene.model
    ways: list[Callable[[], Any]] = [
        model.compile,
        lambda: torch.compile(model, backend="eager")(scene.x),
        lambda: torch.compile(lambda: model(scene.x) * 2, backend="eager")(),
        lambda: torch.compile(scene.forward_backward, backend="eager")(),
    ]
    for way in ways:
        with refused(UsageError, "torch.compile cannot trace a wrapped model", "compile=True"):
            way()


def test_loading_by_assignment(scene: Scene) -> None:
    with refused(UsageError, "assign=True", "load without assign"):
        scene.model.load_state_dict(scene.model.state_dict(), assign=True)


def test_a_state_dict_that_lacks_keys(scene: Scene) -> None:
    state = {key: value + 1 for key, value in scene.model.state_dict().items() if key != "4.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "4.bias"'):
        scene.model.load_state_dict(state)


def test_a_state_dict_of_another_model(scene: Scene) -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\)"):
        scene.model.load_state_dict(scene.model.state_dict() | {"5.weight": torch.ones(2)})
    wrong_shape = scene.model.state_dict() | {"4.bias": torch.ones(7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 4\.bias"):
        scene.model.load_state_dict(wrong_shape)
    with pytest.raises(TypeError, match="state_dict"):
        scene.model.load_state_dict([1, 2])


def test_a_parameter_replaced_after_wrapping(scene: Scene) -> None:
    layer = scene.model.model[4]
    kept = layer.weight
    layer.weight = nn.Parameter(torch.ones(2, 8))
    for call in (scene.forward_backward, scene.model.synchronize, lambda: scene.model(scene.x)):
        with refused(ModelChangedError, "'4.weight'", "replaced or removed", "wrap the model again", "copy new values"):
            call()
    layer.weight = kept


def test_a_parameter_removed_after_wrapping(scene: Scene) -> None:
    layer = scene.model.model[4]
    kept = layer.bias
    layer.bias = None
    with refused(ModelChangedError, "'4.bias'", "replaced or removed"):
        scene.forward_backward()
    layer.bias = kept


def test_a_parameter_added_after_wrapping(scene: Scene) -> None:
    layer = scene.model.model[3]
    layer.gain = nn.Parameter(torch.ones(()))
    for call in (scene.forward_backward, lambda: scene.model(scene.x)):
        with refused(ModelChangedError, "'3.gain' of layer 3", "added", "after wrapping", "wrap it again"):
            call()
    del layer.gain


def test_a_layer_added_after_wrapping(scene: Scene) -> None:
    scene.model.model.append(nn.Linear(2, 2))
    with refused(ModelChangedError, "6 layers", "5", "wrap"):
        scene.forward_backward()
    del scene.model.model[5]


def test_a_layer_replaced_after_wrapping(scene: Scene) -> None:
    kept = scene.model.model[3]
    scene.model.model[3] = nn.ReLU()
    with refused(ModelChangedError, "layer 3", "replaced", "wrap"):
        scene.forward_backward()
    scene.model.model[3] = kept


def test_the_inner_model_cast_after_wrapping() -> None:
    with RoundPipe(build(), devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=1)) as model:
        model.model.double()
        for call in (lambda: model(torch.ones(2, 4)), model.synchronize):
            with refused(ModelChangedError, "'0.weight'", "moved or cast", "torch.float64", "before wrapping"):
                call()
        model.model.float()
        with refused(ModelChangedError, "'0.weight'"):
            model(torch.ones(2, 4))


def test_copying_a_roundpipe(scene: Scene) -> None:
    with refused(UsageError, "cannot be copied", "deepcopy(wrapper.original_model)"):
        copy.deepcopy(scene.model)
    with refused(UsageError, "cannot be copied", ".original_model"):
        copy.copy(scene.model)


def test_pickling_a_roundpipe(scene: Scene) -> None:
    with refused(UsageError, "cannot be pickled", "state_dict()"):
        pickle.dumps(scene.model)
    with refused(UsageError, "cannot be pickled", "state_dict()"):
        torch.save(scene.model, io.BytesIO())


def test_setting_what_is_fixed(scene: Scene) -> None:
    for name in ("model", "name", "num_layers", "optim_dtype", "model_run_config"):
        with refused(UsageError, repr(name), "cannot be set", "wrap the model again"):
            setattr(scene.model, name, None)
        with refused(UsageError, repr(name), "cannot be"):
            delattr(scene.model, name)


def test_an_original_model_that_is_none(scene: Scene) -> None:
    with refused(ArgumentTypeError, "original_model must be an nn.Module", "str"):
        scene.model.set_original_model("gpt")  # type: ignore[arg-type]


def test_an_attribute_nobody_has(scene: Scene) -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        scene.model.no_such_thing


def test_a_closed_model(scene: Scene) -> None:
    model = RoundPipe(build(), devices=["cpu"], name="short lived")
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    weights = copy.deepcopy(model.state_dict())
    model.close()
    model.close()
    uses: list[Callable[[], Any]] = [
        lambda: model(scene.x),
        lambda: model.forward_backward((scene.x,)),
        lambda: model.step(optimizer.step),
        model.synchronize,
        model.zero_grad,
        model.timeline,
        model.planning_profile,
        lambda: model.load_state_dict(weights),
    ]
    for use in uses:
        with refused(ClosedError, "short lived was closed", "wrap the model again"):
            use()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_backward_after_close(scene: Scene) -> None:
    with RoundPipe(nn.Linear(4, 2), devices=["cpu"], name="short lived") as model:
        output = model(scene.x)
    with refused(ClosedError, "short lived was closed"):
        output.sum().backward()


def test_a_buffer_shared_between_layers_and_written(scene: Scene) -> None:
    class Counts(nn.Module):
        def __init__(self, seen: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("seen", seen)
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x * self.weight

    seen = torch.zeros(())
    with RoundPipe(nn.Sequential(Counts(seen), Counts(seen)), devices=["cpu"] * 2) as model:
        for _ in range(2):
            with refused(UsageError, "buffer '0.seen'", "several layers", "layer 0", "of its own"):
                model.forward_backward((scene.x,), loss_fn=lambda outputs, labels: outputs.sum())
        with torch.no_grad(), refused(UsageError, "buffer '0.seen'"):
            model(scene.x)
        assert seen.item() == 0
