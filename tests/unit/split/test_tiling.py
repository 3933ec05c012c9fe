"""Tokenwise modules are found by running them on parts of their input, and run tile by tile with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_split import SplitModels, assert_same_training, plain_call, recomputing
from roundpipe.split import tiling as tiling
from roundpipe.split.tiling import TokenwiseSearch, is_long, tiled

WIDTH = 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Mixing(nn.Module):
    """Adds to each token the tokens before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Averaging(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Positional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1)


class Routed(nn.Module):
    """Tokenwise, but calls top-k: KeptRoutes would save the choices of each tile separately."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.topk(1).values


class Named(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class Whole(nn.Module):
    """Works on sequences of one length only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 6, WIDTH) * 2


class Shrinking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixing, self.feed = RootMeanSquare(), Mixing(), FeedForward()
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x + self.feed(self.norm(self.mixing(x))))


def found_in(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    search = TokenwiseSearch()
    with torch.no_grad(), search.watching(module):
        module(*args, **kwargs)
    return search.found()


def hidden(num_rows: int = 2, num_tokens: int = 6) -> Tensor:
    return torch.randn(num_rows, num_tokens, WIDTH, generator=torch.Generator().manual_seed(2))


def test_norms_and_feed_forward_parts_are_found_and_modules_that_mix_tokens_are_not() -> None:
    assert found_in(Layer(), hidden()) == ("norm", "feed")


def test_the_outermost_module_is_taken() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed = RootMeanSquare(), FeedForward()

        def forward(self, x: Tensor) -> Tensor:
            return self.feed(self.norm(x))

    assert found_in(Both(), hidden()) == ("",)


@pytest.mark.parametrize("build", [Mixing, Averaging, Positional, Routed, Dropping, Whole, Shrinking])
def test_modules_that_mix_tokens_or_choose_or_draw_are_not_tokenwise(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert found_in(build(), hidden()) == ()


def test_modules_called_with_more_than_hidden_states_are_not_tokenwise() -> None:
    assert found_in(Named(), hidden()) == ("",)
    assert found_in(Named(), hidden(), scale=2.0) == ()
    assert found_in(Named(), hidden(), 2.0) == ()
    assert found_in(Named(), hidden()[0]) == ()
    assert found_in(Named(), hidden().long()) == ()
    assert found_in(Named(), hidden()[:, :1]) == ()


def test_modules_of_torch_are_not_tiled() -> None:
    assert found_in(nn.Linear(WIDTH, WIDTH), hidden()) == ()


def test_a_module_called_twice_must_be_tokenwise_both_times() -> None:
    class Changing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[-1] == WIDTH else x.cumsum(1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Changing()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x)[..., :2])

    assert found_in(Twice(), hidden()) == ()


def test_a_module_with_hooks_is_not_tiled() -> None:
    layer = Layer()
    layer.feed.up.register_forward_hook(lambda module, args, output: None)
    layer.norm.register_forward_pre_hook(lambda module, args: None)
    assert found_in(layer, hidden()) == ()


def test_watching_leaves_no_hooks() -> None:
    layer = Layer()
    found_in(layer, hidden())
    assert not any(module._forward_hooks for module in layer.modules())


# Running.


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LONG_TOKENS", 8)
    monkeypatch.setattr(tiling, "TILE_TOKENS", 6)


@pytest.mark.usefixtures("short")
def test_a_call_is_long_by_the_tokens_of_its_hidden_states() -> None:
    assert is_long([None, 3, torch.ones(2, 5, WIDTH)])
    assert not is_long([torch.ones(2, 4, WIDTH)])
    assert not is_long([torch.ones(2, 50), torch.ones(2, 50, 1, dtype=torch.long), "text"])


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
def test_tile_by_tile_values_and_gradients_are_those_of_the_whole(num_rows: int) -> None:
    torch.manual_seed(1)
    layer = Layer().double()
    inputs = [hidden(num_rows, 11).double().requires_grad_() for _ in range(2)]
    sizes: list[int] = []
    layer.feed.up.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    expected = layer(inputs[0])
    expected.square().sum().backward()
    gradients = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    assert sizes == [11]
    sizes.clear()
    with tiled(layer, ("norm", "feed")):
        found = layer(inputs[1])
    found.square().sum().backward()
    assert max(sizes) == max(6 // num_rows, 1)
    assert sum(sizes) == 2 * 11, "once forward, once again for backward"
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for param, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient)


@pytest.mark.usefixtures("short")
def test_without_grad_nothing_is_run_twice() -> None:
    layer, sizes = Layer(), []
    layer.feed.up.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    with torch.no_grad(), tiled(layer, ("feed",)):
        found = layer(hidden())
    assert sizes == [3, 3]
    torch.testing.assert_close(found, layer(hidden()))


def test_forwards_are_restored_also_after_an_error() -> None:
    layer = Layer()
    own = layer.feed.forward
    layer.feed.forward = own
    with pytest.raises(ZeroDivisionError), tiled(layer, ("norm", "feed")):
        raise ZeroDivisionError
    assert layer.feed.__dict__["forward"] is own
    assert "forward" not in layer.norm.__dict__


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = RootMeanSquare()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return {"loss": self.norm(h).square().mean()}


def test_long_microbatches_of_a_split_model_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    module = Model().double()
    reference = Model().double()
    reference.load_state_dict(module.state_dict())
    x = hidden(4, 10).double()
    models = SplitModels()
    try:
        model = models.wrap(module, {"x": x[:, :6]}, 2)
        monkeypatch.setattr(tiling, "LONG_TOKENS", 8)
        monkeypatch.setattr(tiling, "TILE_TOKENS", 6)
        tiles: list[int] = []
        real = tiling._TiledForward.__call__
        monkeypatch.setattr(
            tiling._TiledForward, "__call__", lambda self, given: tiles.append(given.shape[1]) or real(self, given)
        )
        loss = model.forward_backward(
            (), {"x": x}, None, lambda output, _: output["loss"], run_config=recomputing(model, 2)
        )
        torch.testing.assert_close(loss, plain_call(reference, {"x": x}, num_microbatch=2).loss)
        names = [name for name, _ in reference.named_parameters()]
        assert_same_training(model, reference, shared=names)
        assert len(tiles) == 2 * (2 * 2 * 2 + 1), "two microbatches; two parts of two layers twice, and the last norm"
    finally:
        models.close()
