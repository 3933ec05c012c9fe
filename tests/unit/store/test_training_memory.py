"""The host memory that training needs is computed, row by row, before any of it is allocated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, HostMemoryError, RoundPipe, optim, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.store import PinMode, host_memory
from roundpipe.store.training_memory import SECOND_WEIGHTS, require_training_memory, training_memory

DEVICES = ["cpu"] * 3
WIDTH, NUM_LAYERS = 64, 4
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH
BF16, F32 = torch.bfloat16, torch.float32


def network(dtype: torch.dtype = BF16, device: str = "cpu") -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype, device=device) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers)


def let_be_available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: num_bytes)


# The rows. The numbers are the bytes per parameter of the table in docs/memory.md.


@pytest.mark.parametrize(
    ("dtype", "optim_dtype", "gradients", "copies", "state", "second"),
    [
        (BF16, F32, 2, 2, 8, 2),  # a float32 copy shares its high halves with the weight
        (BF16, None, 2, 2, 4, 2),
        (F32, None, 4, 4, 8, 4),
        (F32, F32, 4, 4, 8, 4),
        (torch.float16, F32, 2, 4, 8, 2),
        (BF16, torch.float64, 2, 8, 16, 2),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_per_parameter(
    dtype: torch.dtype,
    optim_dtype: torch.dtype | None,
    gradients: int,
    copies: int,
    state: int,
    second: int,
    device: str,
) -> None:
    rows = training_memory(list(network(dtype, device)), optim_dtype, PinMode.ALLOC)
    assert {name: size / NUM_PARAMETERS for name, size in rows.items()} == {
        "weights": dtype.itemsize if device == "meta" else 0,
        "buffers, as calls read them": 0,
        "gradients": gradients,
        "master weights": copies,
        "optimizer state (Adam)": state,
        "weights while they move": 0,  # less than what training allocates later
        SECOND_WEIGHTS: second,
    }


def test_frozen_parameters_take_their_weights_only() -> None:
    model = network()
    model[:3].requires_grad_(False)
    rows = training_memory(list(model), F32, PinMode.OFF)
    assert sum(rows.values()) == (2 + 2 + 8 + 2) * WIDTH * WIDTH


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", PinMode)
def test_inference_takes_no_more_than_the_weights(mode: PinMode, device: str) -> None:
    rows = training_memory(list(network(device=device)), F32, mode, trains=False)
    moving = 2 * WIDTH * WIDTH if mode is PinMode.ALLOC else 0  # one layer
    assert sum(rows.values()) == moving + (2 * NUM_PARAMETERS if device == "meta" else 0)


def test_a_shared_parameter_counts_once() -> None:
    model = network()
    model[3].weight = model[0].weight
    rows = training_memory(list(model), F32, PinMode.ALLOC)
    assert rows["gradients"] == 2 * 3 * WIDTH * WIDTH


def test_weights_in_one_memory_are_free_when_all_have_moved() -> None:
    model = network().requires_grad_(False)
    memory = torch.zeros(NUM_LAYERS, WIDTH, WIDTH, dtype=BF16)
    for layer, weight in zip(model, memory, strict=True):
        layer.weight.data = weight
    assert training_memory(list(model), F32, PinMode.ALLOC)["weights while they move"] == memory.nbytes


def test_buffers_are_counted() -> None:
    model = network()
    model[1].register_buffer("table", torch.zeros(1000, dtype=torch.int32))
    rows = training_memory(list(model), F32, PinMode.ALLOC)
    assert rows["buffers, as calls read them"] == 4000


@pytest.mark.parametrize(("mode", "trains", "factor"), [("alloc", False, 1), ("off", False, 0), ("off", True, 1)])
def test_weights_mapped_from_a_file(tmp_path: Path, mode: str, trains: bool, factor: int) -> None:
    """They need memory when they are copied or trained, and none when they are read in place."""
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    model = network(device="meta")
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    model.requires_grad_(trains)
    rows = training_memory(list(model), F32, PinMode(mode))
    assert rows["weights"] == factor * 2 * NUM_PARAMETERS
    assert rows["weights while they move"] == 0


# Wrapping.

ALL_EXACT = 2 + 2 + 8  # bytes per parameter: gradients, optimizer copies, moments; weights are in memory already
ALL_ASYNC = ALL_EXACT + 2


def test_a_model_is_refused_if_its_moments_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    places = [p.data_ptr() for p in model.parameters()]
    let_be_available(monkeypatch, ALL_EXACT * NUM_PARAMETERS - 1)
    with pytest.raises(HostMemoryError) as caught:
        RoundPipe(model, optim_dtype=F32, devices=DEVICES)
    message = str(caught.value)
    for fragment in (
        *("gradients", "master weights", "optimizer state (Adam)", "second weights of asynchronous steps"),
        *("needed in all", "available", "missing", "requires_grad_(False)", "ROUNDPIPE_HOST_MEMORY_CHECK"),
    ):
        assert fragment in message
    assert [p.data_ptr() for p in model.parameters()] == places
    let_be_available(monkeypatch, ALL_ASYNC * NUM_PARAMETERS)
    RoundPipe(model, optim_dtype=F32, devices=DEVICES).close()


def test_async_steps_that_do_not_fit_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_be_available(monkeypatch, ALL_EXACT * NUM_PARAMETERS)
    RoundPipe(network(), optim_dtype=F32, devices=DEVICES).close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for fragment in ("asynchronous steps", "second weights", "needed in all", "missing", "is_async=False"):
        assert fragment in warning
    caplog.clear()
    RoundPipe(network(), optim_dtype=F32, devices=DEVICES, staleness=0).close()
    assert not caplog.records, "no step keeps the weights twice"
    let_be_available(monkeypatch, ALL_ASYNC * NUM_PARAMETERS)
    RoundPipe(network(), optim_dtype=F32, devices=DEVICES).close()
    assert not caplog.records


def test_second_weights_are_checked_for_all_layers_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer alone would fit, and memory that one layer allocates still counts as available for the next."""
    with RoundPipe(network(F32), devices=DEVICES) as model:
        optimizer = optim.Adam(model.optim_parameters())
        train(model, F32)
        let_be_available(monkeypatch, 4 * NUM_PARAMETERS - 1)
        model.step(optimizer.step)
        with pytest.raises(HostMemoryError, match="second weights"):
            model.synchronize()
        assert all(record.back is None for record in model._engine.store.parameters)


def train(model: RoundPipe, dtype: torch.dtype = BF16) -> None:
    x = torch.ones(6, WIDTH, dtype=dtype)
    model.forward_backward(input_args=(x,), loss_fn=lambda out, _: out.float().mean())


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_the_user_can_overrule_the_check(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_be_available(monkeypatch, 1)
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY_CHECK", policy)
    with RoundPipe(network(), optim_dtype=F32, devices=DEVICES) as model:
        optimizer = optim.Adam(model.optim_parameters())
        train(model)
        model.step(optimizer.step, is_async=False)
    warnings = [record for record in caplog.records if "does not fit into host memory" in record.getMessage()]
    assert bool(warnings) == (policy == "warn")


def test_an_unknown_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY_CHECK", "no")
    with pytest.raises(ConfigError, match=r"ROUNDPIPE_HOST_MEMORY_CHECK='no'.*refuse, warn, off"):
        RoundPipe(network(), devices=DEVICES)


# Inference.


def test_a_frozen_model_is_not_refused_for_what_training_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_available(monkeypatch, 2 * WIDTH * WIDTH)
    with RoundPipe(network().requires_grad_(False), optim_dtype=F32, devices=DEVICES) as model:
        assert model(torch.ones(6, WIDTH, dtype=BF16)).shape == (6, WIDTH)


@pytest.mark.parametrize("first", ["forward_backward", "forward", "optim_parameters"])
def test_a_model_wrapped_without_grad_is_checked_when_it_begins_to_train(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_available(monkeypatch, 2 * WIDTH * WIDTH)
    x = torch.ones(6, WIDTH, dtype=BF16)
    uses: dict[str, Any] = {"forward_backward": train, "forward": lambda m: m(x), "optim_parameters": trainable}
    with torch.no_grad():
        model = RoundPipe(network(), optim_dtype=F32, devices=DEVICES)
        assert model(x).shape == (6, WIDTH)
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="optimizer state"):
            uses[first](model)
    let_be_available(monkeypatch, ALL_ASYNC * NUM_PARAMETERS)
    train(model)
    model.close()


def trainable(model: RoundPipe) -> list[nn.Parameter]:
    return list(model.optim_parameters())


# Models that are wrapped in parts or split.


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + 1)


def test_a_model_in_parts_is_checked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = InParts()
    options: dict[str, Any] = {"use_sequential_preset": False, "optim_dtype": F32, "devices": DEVICES}
    let_be_available(monkeypatch, 2 * ALL_EXACT * NUM_PARAMETERS - 1)
    with pytest.raises(HostMemoryError, match="optimizer state"):
        wrap_model_to_roundpipe(model, upper_threshold=1000, **options)
    let_be_available(monkeypatch, 2 * ALL_EXACT * NUM_PARAMETERS)
    wrapped = wrap_model_to_roundpipe(model, upper_threshold=1000, **options)
    assert isinstance(wrapped, AutoRoundPipe)
    wrapped.close()


def test_one_function_raises_for_any_list_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_available(monkeypatch, 14 * NUM_PARAMETERS - 1)
    with pytest.raises(HostMemoryError, match="weights  "):
        require_training_memory(list(network(device="meta")), F32, PinMode.ALLOC)
