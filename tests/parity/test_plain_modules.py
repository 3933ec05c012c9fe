"""Modules of any shape, wrapped without examples of their inputs: part by part they compute what the plain ones do."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers_parity import assert_same, assert_same_grads, assert_same_state, batch, seeded
from roundpipe import AutoRoundPipe, MergeError, RoundPipePackedData, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.microbatch.merge import LateMerge

WHOLE = RoundPipeRunConfig(num_microbatch=1)  # as plain torch runs a batch


class Conv(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.conv(x)))


class UNet(nn.Module):
    """Pools what a block returns, and keeps it for a block of another list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Conv(2, 4), Conv(4, 8), Conv(8, 16)])
        self.middle = Conv(16, 16)
        self.up = nn.ModuleList([Conv(32, 8), Conv(16, 4), Conv(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skipped.pop()], 1))
        return self.head(x)


class Residual(nn.Module):
    """Adds what a block is given to what it returns, one way and another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Conv(8, 8) for _ in range(4)])
        self.classify = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i % 2:
                y = block(x)
                y += x
                x = y
            else:
                x = F.relu(x + block(x))
        assert isinstance(x, Tensor)
        return self.classify(x.mean((2, 3)))


class Dense(nn.Module):
    """Looks at the type and the rows of what blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Conv(2 * i + 2, 2) for i in range(4)])

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        found = [x] if isinstance(x, Tensor) else list(x)
        for block in self.blocks:
            y = block(torch.cat(found, 1))
            found += [y] if isinstance(y, Tensor) else y
        return found[1], torch.stack([row.mean() for row in found[2]])


class Twisted(nn.Module):
    """Elements whose outputs are tuples and dicts, used one after the other and twice."""

    class Element(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return {"h": torch.tanh(self.linear(x)), "pair": (x * scale, scale), "nothing": None}

    def __init__(self) -> None:
        super().__init__()
        self.elements = nn.ModuleList([self.Element() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for element in (*self.elements, self.elements[0]):
            found = element(x, scale=0.5)
            assert found["pair"][1] == 0.5
            assert found["nothing"] is None
            x = found["h"] + found["pair"][0]
        return x


class Recurrent(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layers = nn.ModuleList([layer(6, 6, batch_first=batch_first) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            y, state = layer(x)
            x = x + y
        last = state[0] if isinstance(state, tuple) else state
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(x), last[-1]


class Attentive(nn.Module):
    """Layers whose first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1)


IMAGES, SEQUENCES, ROWS = (6, 2, 16, 16), (6, 5, 6), (6, 6)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "u-net": (UNet, IMAGES),
    "residual": (Residual, IMAGES),
    "dense": (Dense, IMAGES),
    "twisted": (Twisted, ROWS),
    "attention": (Attentive, SEQUENCES),
    **{
        f"{layer.__name__}, {'batch' if batch_first else 'time'} first": (
            lambda layer=layer, batch_first=batch_first: Recurrent(layer, batch_first),  # type: ignore[misc]
            SEQUENCES,
        )
        for layer in (nn.GRU, nn.LSTM, nn.RNN)
        for batch_first in (True, False)
    },
}


def in_parts(net: nn.Module, num_devices: int = 2, **options: Any) -> AutoRoundPipe:
    options = {"lower_threshold": 64, "upper_threshold": 100, **options}
    model = wrap_model_to_roundpipe(net, devices=["cpu"] * num_devices, **options)
    assert isinstance(model, AutoRoundPipe)
    return model


def loss_of(output: Any) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([(each * torch.arange(each.numel()).view_as(each).cos()).sum() for each in outputs]).sum()


def detached(output: Any) -> Any:
    return tuple(each.detach() for each in output) if isinstance(output, tuple) else output.detach()


@pytest.mark.parametrize("kind", NETS)
def test_in_one_microbatch_every_bit_is_the_plain_models(kind: str) -> None:
    build, shape = NETS[kind]
    plain = seeded(build)
    with in_parts(copy.deepcopy(plain), model_run_config=WHOLE) as model:
        optimizers = [torch.optim.SGD(params, lr=0.01) for params in (model.optim_parameters(), plain.parameters())]
        for seed in range(3):
            x, y = batch(*shape, seed=seed).requires_grad_(), batch(*shape, seed=seed).requires_grad_()
            ours, theirs = model(x), plain(y)
            assert_same(detached(ours), detached(theirs), f"outputs {seed}")
            loss_of(ours).backward()
            loss_of(theirs).backward()
            assert_same(x.grad, y.grad, "gradient of the input")
            if seed == 2:
                break
            model.step(lambda: (optimizers[0].step(), optimizers[0].zero_grad()), is_async=False)
            optimizers[1].step()
            optimizers[1].zero_grad()
        model.synchronize()
        assert_same_grads(model, plain)
        assert_same_state(model, plain)


@pytest.mark.parametrize("kind", NETS)
def test_cut_into_microbatches_it_trains_as_the_plain_model_to_rounding(kind: str, num_devices: int) -> None:
    build, shape = NETS[kind]
    plain = seeded(build)
    with in_parts(copy.deepcopy(plain), num_devices, model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model:
        ours, theirs = model(batch(*shape)), plain(batch(*shape))
        torch.testing.assert_close(detached(ours), detached(theirs))
        loss_of(ours).backward()
        loss_of(theirs).backward()
        model.synchronize()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(model(batch(*shape)), plain(batch(*shape)))


def test_what_the_code_between_elements_sees_is_a_tensor() -> None:
    seen: list[Any] = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Conv(2, 2) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                seen.append(x)
            return seen[0]

    with in_parts(Seeing(), model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model:
        output = model(batch(*IMAGES))
        assert [type(x) for x in seen] == [LateMerge, LateMerge, Tensor]
        assert type(output) is Tensor
        assert isinstance(model.blocks[0](batch(*IMAGES)), RoundPipePackedData), "outside of the model's forward"


def test_packed_data_that_is_asked_for_is_given() -> None:
    seen: list[Any] = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Conv(2, 2) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.blocks[0](x))
            return self.blocks[1](seen[0])

    net = Seeing()
    override = {net.blocks[0]: RoundPipeRunConfig(merge_output=False, num_microbatch=3)}
    with in_parts(net, override_config=override) as model:
        model(batch(*IMAGES))
    assert isinstance(seen[0], RoundPipePackedData)


# What is said of it.


def test_wrapping_tells_of_example_inputs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        in_parts(UNet()).close()
    assert "(UNet): it is wrapped part by part" in caplog.text
    assert "example_inputs={...}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        in_parts(UNet(), use_sequential_preset=False).close()
        wrap_model_to_roundpipe(UNet(), example_inputs={"x": batch(*IMAGES)}, devices=["cpu"]).close()
    assert "example_inputs" not in caplog.text


def test_a_failing_call_tells_of_example_inputs() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, : 1 + len(x)]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Uneven(), Uneven()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x) + 1

    with (
        in_parts(Net(), model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model,
        pytest.raises(MergeError) as raised,
    ):
        model(batch(7, 6))
    assert any("example_inputs={...}" in note for note in raised.value.__notes__)


def test_layers_that_cannot_be_cut_are_named(caplog: pytest.LogCaptureFixture) -> None:
    net = Recurrent(nn.GRU, batch_first=True)
    with caplog.at_level(logging.WARNING, logger="roundpipe"), in_parts(net) as model:
        assert [part.model_run_config.num_microbatch for part in model.layers] == [1, 1, 1]
    assert "layers.0, layers.1, layers.2: run in one microbatch, because GRU" in caplog.text
    net = Recurrent(nn.GRU, batch_first=True)
    with in_parts(net, override_config={net.layers[0]: RoundPipeRunConfig(num_microbatch=2)}) as model:
        assert [part.model_run_config.num_microbatch for part in model.layers] == [2, 1, 1]
