"""Random numbers in a split model: every layer draws from its own stream, the same when it is recomputed.

The reference is the plain model with the streams of the layers around its modules, in one graph: nothing of it is
recomputed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers_parity import add_grads, assert_same, take_grads
from helpers_split import Block, SplitModels, Toy, assert_same_training, own_loss, recomputing, rows
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.runtime.rng import Phase, RandomStream, draw_call_seed, stream_seed

NUM_MICROBATCH = 3
SEED = 9


class NumpyDropout(Block):
    """Dropout with numpy's generator, and a scale from Python's; draws also at a rate of 0."""

    rate = 0.0

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        keep = torch.from_numpy(np.random.rand(*h.shape) >= self.rate)
        return super().forward(h) * keep * (1.0 + self.rate * random.random())


class TorchDropout(Block):
    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.dropout(super().forward(h), 0.4, self.training)


class TorchNoise(Block):
    """Draws random numbers with other functions than dropout."""

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(h) * (torch.rand_like(h) + 0.5)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def in_its_stream(module: nn.Module, seed: int, draws_globally: bool) -> None:
    """Seed the generators in a plain module as the layer does that runs it."""
    forward = type(module).forward

    def run(*args: Any) -> Any:
        with RandomStream(seed, is_observed=True):
            if draws_globally:
                own = int(torch.randint(2**31, ()))
                np.random.seed(own)
                random.seed(own)
            return forward(module, *args)

    module.forward = run


def reference_call(reference: Any, draws_globally: bool) -> Tensor:
    """Microbatch by microbatch; block i is layer i + 1."""
    before = take_grads(reference)
    torch.manual_seed(SEED)
    call_seed = draw_call_seed()
    losses = []
    for microbatch, x in enumerate(rows().tensor_split(NUM_MICROBATCH)):
        for i, block in enumerate(reference.blocks):
            in_its_stream(block, stream_seed(call_seed, i + 1, microbatch, Phase.FORWARD), draws_globally)
        losses.append(own_loss(reference(x), None))
        losses[-1].backward()
    for block in reference.blocks:
        del block.forward
    add_grads(reference, before)
    return losses[0].detach() + losses[1].detach() + losses[2].detach()


def draw_from_now_on(*modules: nn.Module) -> None:
    """A model whose values depend on the process's generators is refused; so the rate is set after wrapping."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, NumpyDropout):
                part.rate = 0.4


def our_call(model: RoundPipe, config: RoundPipeRunConfig) -> Tensor:
    torch.manual_seed(SEED)
    loss: Tensor = model.forward_backward((), {"x": rows()}, None, own_loss, run_config=config)
    model.synchronize()
    return loss


KINDS: dict[str, tuple[type[Block], bool]] = {
    "numpy": (NumpyDropout, True),
    "dropout": (TorchDropout, False),
    "noise": (TorchNoise, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_draw_the_same_when_they_are_recomputed(models: SplitModels, num_devices: int, kind: str) -> None:
    block, draws_globally = KINDS[kind]
    module = seeded(lambda: Toy(block=block))
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, num_devices)
    draw_from_now_on(module, reference)
    for config in (RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH), recomputing(model, NUM_MICROBATCH)):
        assert_same(our_call(model, config), reference_call(reference, draws_globally), "loss")
        assert_same_training(model, reference)


def test_the_global_generators_are_restored(models: SplitModels) -> None:
    model = models.wrap(seeded(lambda: Toy(block=NumpyDropout)), {"x": rows()}, 2)
    draw_from_now_on(model.original_model)
    np.random.seed(1)
    random.seed(2)
    expected = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(2)
    our_call(model, recomputing(model, NUM_MICROBATCH))
    assert (np.random.rand(), random.random()) == expected


def test_wrapping_draws_nothing_from_the_users_generators(models: SplitModels) -> None:
    module = seeded(lambda: Toy(block=NumpyDropout))
    np.random.seed(1)
    random.seed(2)
    torch.manual_seed(4)
    before = (np.random.get_state()[1].tobytes(), random.getstate(), torch.get_rng_state())
    models.wrap(module, {"x": rows()}, 2)
    after = (np.random.get_state()[1].tobytes(), random.getstate(), torch.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_wrapping_seeds_no_gpu(models: SplitModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would also seed the user's generators on GPUs."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    module = seeded(Toy)
    seeds.clear()
    models.wrap(module, {"x": rows()}, 2)
    assert seeds == []


def test_two_calls_draw_different_numbers(models: SplitModels) -> None:
    model = models.wrap(seeded(lambda: Toy(block=NumpyDropout)), {"x": rows()}, 2)
    draw_from_now_on(model.original_model)
    torch.manual_seed(SEED)
    first, second = (model.forward_backward((), {"x": rows()}, None, own_loss) for _ in range(2))
    assert not torch.equal(first, second)


class WithModules(Toy):
    """Dropout modules in the prologue, between the blocks and in the epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = nn.Dropout(0.3), nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.before(self.embed(x))
        h = start
        for block in self.blocks:
            h = self.between(block(h)) + start
        return self.after(self.head(h)) + start


def test_dropout_between_blocks_gives_gradients_of_one_forward(models: SplitModels) -> None:
    """A directional derivative: it is that of the loss with the same masks, so recomputing has drawn them again."""
    module = seeded(WithModules).double()
    x = rows().double()
    model = models.wrap(module, {"x": x}, 3)
    config = recomputing(model, 2)

    def loss() -> Tensor:
        torch.manual_seed(SEED)
        return model.forward_backward((), {"x": x}, None, own_loss, run_config=config)

    loss()
    model.synchronize()
    direction = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    slope = sum(float((param.grad * direction[name]).sum()) for name, param in model.named_parameters())
    eps = 1e-6
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.add_(direction[name], alpha=sign * eps)
        values.append(float(loss()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * eps), rel=1e-5)


def test_two_runs_from_one_seed_are_the_same_on_any_number_of_devices(models: SplitModels) -> None:
    found = []
    for num_devices in (1, 2, 3):
        model = models.wrap(seeded(WithModules), {"x": rows()}, num_devices)
        loss = our_call(model, RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH))
        found.append([loss, *(param.grad for param in model.parameters())])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


class OneMask(Toy):
    """Draws a mask in its own code, and multiplies with it in two segments."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h * mask) * mask


def test_a_random_mask_used_in_two_segments_is_refused(models: SplitModels) -> None:
    """Although calibration runs without dropout."""
    with pytest.raises(NotImplementedError, match="uses random numbers drawn in an earlier one"):
        models.wrap(seeded(OneMask), {"x": rows()}, 1)


class DroppingBetween(Toy):
    """Applies dropout to the output of one block before the next block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = nn.functional.dropout(block(h), 0.5, self.training)
        return self.head(h)


def test_dropout_in_the_models_own_code(models: SplitModels) -> None:
    """Training is the same however layers are recomputed, and without dropout equals the plain model."""
    module = seeded(DroppingBetween)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    losses = [
        our_call(model, config)
        for config in (RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH), recomputing(model, NUM_MICROBATCH))
    ]
    assert losses[0].isfinite()
    assert_same(losses[0], losses[1])
    model.eval()
    reference.eval()
    with torch.no_grad():
        plain = sum(own_loss(reference(x), None) for x in rows().tensor_split(NUM_MICROBATCH))
    assert (losses[0] - plain).abs() > 1e-3, "nothing is dropped"
    assert_same(our_call(model, RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)), plain)


class NoisyInput(Toy):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        h = self.embed(x + noise)
        for block in self.blocks:
            h = block(h)
        return self.head(h) + noise


def test_values_that_depend_on_the_processs_generators_when_a_model_is_wrapped(models: SplitModels) -> None:
    module = seeded(lambda: Toy(block=NumpyDropout))
    draw_from_now_on(module)
    with pytest.raises(NotImplementedError, match="not split into layers"):
        models.wrap(module, {"x": rows()}, 1)


def test_random_noise_used_in_two_segments_is_refused(models: SplitModels) -> None:
    with pytest.raises(NotImplementedError, match="not split into layers"):
        models.wrap(seeded(NoisyInput), {"x": rows()}, 1)
