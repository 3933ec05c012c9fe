"""On a real GPU: recurrent layers, models in parts, and pinned weights that are saved and copied as plain ones."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

WIDTH, STEPS = 32, 4
THREE = RoundPipeRunConfig(num_microbatch=3)


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


class First(nn.Module):
    def forward(self, output: tuple[Tensor, Any]) -> Tensor:
        return output[0]


def chain(layer: Any) -> nn.Sequential:
    torch.manual_seed(3)
    first, second = layer(WIDTH, WIDTH, num_layers=2, batch_first=True), layer(WIDTH, WIDTH, batch_first=True)
    return nn.Sequential(first, First(), nn.Linear(WIDTH, WIDTH), second, First())


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("workers", [1, 2])
def test_recurrent_layers_train_as_on_the_gpu_alone(layer: Any, workers: int) -> None:
    plain = chain(layer)
    with RoundPipe(copy.deepcopy(plain), devices=["cuda:0"] * workers, model_run_config=THREE) as model:
        plain.cuda()
        ours, theirs = (torch.optim.SGD(p, lr=0.02) for p in (model.optim_parameters(), plain.parameters()))
        for seed in range(STEPS):
            x = rows(seed, 12, 9, WIDTH)
            loss = model.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
            expected = plain(x.cuda()).square().sum()
            expected.backward()
            torch.testing.assert_close(loss, expected.detach().cpu(), rtol=1e-4, atol=1e-4)
            model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            theirs.step()
            theirs.zero_grad()
        model.synchronize()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach().cpu(), rtol=1e-3, atol=1e-4, msg=name)


class Skipping(nn.Module):
    """Keeps what one block returns for another list, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(3)])
        self.up = nn.ModuleList([nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return x


def test_a_model_in_parts_computes_what_the_plain_one_does() -> None:
    torch.manual_seed(3)
    plain = Skipping()
    model = wrap_model_to_roundpipe(
        copy.deepcopy(plain),
        lower_threshold=64,
        upper_threshold=100,
        model_run_config=THREE,
        devices=["cuda:0"] * 2,
    )
    assert isinstance(model, AutoRoundPipe)
    with model:
        x = rows(1, 6, 4, 16, 16)
        output, expected = model(x), plain(x)
        torch.testing.assert_close(output.detach(), expected.detach(), rtol=1e-4, atol=1e-4)
        output.square().sum().backward()
        expected.square().sum().backward()
        model.synchronize()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_weights_in_pinned_memory_are_saved_and_copied_as_plain_ones(pin_model: str) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    with RoundPipe(net, pin_model=pin_model, devices=["cuda:0"], model_run_config=THREE) as model:
        model.forward_backward((rows(1, 6, 512),), loss_fn=lambda output, _: output.square().sum())
        model.synchronize()
        for param in net.parameters():
            assert param.untyped_storage().nbytes() == param.nbytes
        file = io.BytesIO()
        torch.save(model.state_dict()["0.bias"], file)
        assert len(file.getvalue()) < 20_000
        twin = copy.deepcopy(model.original_model)
        with torch.no_grad():
            torch.testing.assert_close(model(rows(2, 6, 512)), twin(rows(2, 6, 512)), rtol=1e-3, atol=1e-4)
            twin.cuda()(rows(2, 6, 512).cuda())
    torch.testing.assert_close(dict(net.state_dict()), dict(twin.cpu().state_dict()))
