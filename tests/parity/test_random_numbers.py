"""Random numbers of layers depend on call, layer and microbatch, and on no device and no other thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    DEVICE_COUNTS,
    WAIT_S,
    Models,
    assert_same,
    batch,
    grads_of,
    microbatches,
    mse,
    seeded,
    total,
)
from helpers_plans import legal_plans
from roundpipe import ModelExecutePlan, RoundPipeRunConfig

RECOMPUTED = ModelExecutePlan([range(3)], [range(3, 4), range(3)])
ONE_STAGE = ModelExecutePlan([], [range(4)])


class Drawing(nn.Module):
    """A linear map and a function that draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


def stochastic_depth(x: Tensor) -> Tensor:
    return x.tanh() if torch.rand(1).item() < 0.5 else x * 2


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(x.shape[1])]


def rrelu(x: Tensor) -> Tensor:
    return nn.functional.rrelu(x, training=True)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.4),
    "dropout in place": lambda x: nn.functional.dropout(x * 2, 0.4, inplace=True),
    "feature dropout": lambda x: nn.functional.dropout1d(x.unsqueeze(0), 0.4).squeeze(0),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.4, training=True),
    "stochastic depth": stochastic_depth,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli in place": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli of x": lambda x: x + torch.bernoulli(x.detach().sigmoid()),
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(6),
    "randint": lambda x: x * torch.randint(1, 5, (6,)),
    "randint_like": lambda x: x * torch.randint_like(x, 1, 5),
    "randperm": shuffled,
    "normal": lambda x: x + torch.normal(0.0, 1.0, (6,)),
    "normal of tensors": lambda x: x + torch.normal(x.detach(), x.detach().abs()),
    "normal in place": lambda x: x + torch.empty(6).normal_(),
    "uniform in place": lambda x: x * torch.empty(6).uniform_(0.5, 1.5),
    "exponential": lambda x: x * torch.empty(6).exponential_(),
    "log_normal": lambda x: x * torch.empty(6).log_normal_(),
    "cauchy": lambda x: x * torch.empty(6).cauchy_().clamp(-2, 2),
    "geometric": lambda x: x * torch.empty(6).geometric_(0.5),
    "random in place": lambda x: x * torch.empty(6).random_(1, 5),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(6), 6)],
    "poisson": lambda x: x * torch.poisson(torch.full((6,), 2.0)),
    "rrelu": rrelu,
    "gumbel softmax": lambda x: nn.functional.gumbel_softmax(x),
    "distribution": lambda x: x + torch.distributions.Normal(0.0, 1.0).sample((6,)),
    "attention dropout": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "fractional pooling": lambda x: nn.functional.fractional_max_pool2d(x.view(1, 1, -1, 6), 1, (2, 6)).view(2, 6),
    "gamma": lambda x: x * torch.distributions.Gamma(2.0, 1.0).sample((6,)),
}


def drawing(draw: str) -> nn.Sequential:
    return nn.Sequential(Drawing(DRAWS[draw]), nn.Tanh(), Drawing(DRAWS[draw]), nn.Linear(6, 6))


def dropping() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)),
        nn.Tanh(),
        nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True),
        nn.Dropout(0.2),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


def run_fused(
    models: Models,
    build: Callable[[], nn.Module],
    num_devices: int,
    config: RoundPipeRunConfig = RoundPipeRunConfig(),
    seed: int = 5,
    x: Tensor | None = None,
) -> Any:
    """Two calls; losses, outputs and gradients, and what the main thread draws afterwards."""
    model = models.wrap(seeded(build), num_devices, model_run_config=config)
    torch.manual_seed(seed)
    results: list[Any] = []
    for _ in range(2):
        x = batch(7, 6) if x is None else x
        results.append(model.forward_backward((x,), loss_fn=total, return_outputs=True, run_config=microbatches(3)))
        results.append(torch.rand(2))
    model.synchronize()
    results.append(grads_of(model.model))
    results.append(torch.rand(2))
    models.close()
    return results


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_the_same_on_any_devices_plan_and_grain(models: Models, draw: str) -> None:
    def build() -> nn.Module:
        return drawing(draw)

    expected = run_fused(models, build, 1, RoundPipeRunConfig(execute_plan=ONE_STAGE))
    for num_devices, plan, grain in [(1, RECOMPUTED, "layer"), (2, RECOMPUTED, "stage"), (8, None, "stage")]:
        config = RoundPipeRunConfig(execute_plan=plan, recompute_grain=grain)
        assert_same(run_fused(models, build, num_devices, config), expected, f"{num_devices} devices, {plan}, {grain}")


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_dropout_is_the_same_on_every_device_count(models: Models, grain: str) -> None:
    x = batch(7, 4, 6)
    config = RoundPipeRunConfig(recompute_grain=grain)
    expected = run_fused(models, dropping, 1, RoundPipeRunConfig(execute_plan=ONE_STAGE), x=x)
    for num_devices in DEVICE_COUNTS:
        assert_same(run_fused(models, dropping, num_devices, config, x=x), expected, f"{num_devices} devices")


def test_dropout_is_the_same_for_every_plan_and_grain(models: Models) -> None:
    expected = run_fused(models, lambda: drawing("dropout"), 1)
    for number, plan in enumerate(legal_plans(4, "fused")):
        config = RoundPipeRunConfig(execute_plan=plan, recompute_grain=["stage", "layer"][number % 2])
        assert_same(run_fused(models, lambda: drawing("dropout"), 3, config), expected, str(plan))


def test_dropout_inside_an_lstm_is_the_same_on_any_devices_plan_and_grain(models: Models) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Recurrent(), nn.Tanh(), Recurrent())

    x = batch(7, 3, 6)
    expected = run_fused(models, build, 1, RoundPipeRunConfig(execute_plan=ONE_STAGE), x=x)
    for num_devices, grain in [(2, "stage"), (3, "layer"), (8, "stage")]:
        config = RoundPipeRunConfig(execute_plan=RECOMPUTED, recompute_grain=grain)
        assert_same(run_fused(models, build, num_devices, config, x=x), expected, f"{num_devices} devices, {grain}")


def test_manual_seed_repeats_a_run_and_another_seed_does_not(models: Models, num_devices: int) -> None:
    first, again = (run_fused(models, lambda: drawing("dropout"), num_devices, seed=5) for _ in range(2))
    assert_same(again, first)
    other = run_fused(models, lambda: drawing("dropout"), num_devices, seed=6)
    assert not torch.equal(other[0][1], first[0][1])


def test_calls_layers_and_microbatches_draw_differently(models: Models) -> None:
    model = models.wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 2)
    ones = torch.ones(6, 50)
    config = RoundPipeRunConfig(num_microbatch=6)
    with torch.no_grad():
        rows = torch.cat([model(ones, roundpipe_run_config=config) for _ in range(2)])
    assert len({tuple(row.tolist()) for row in rows}) == 12
    assert 0.1 < (rows > 0).float().mean() < 0.4  # two independent halves


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recomputation_draws_what_forward_drew(models: Models, num_devices: int, grain: str) -> None:
    """The masks are read off the outputs; a plain model with these masks has the same gradients, bit for bit."""
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Identity(), nn.Identity()))
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=RECOMPUTED, recompute_grain=grain)
    model = models.wrap(module, num_devices, model_run_config=config)
    _, output = model.forward_backward((batch(7, 6),), loss_fn=total, return_outputs=True)
    model.synchronize()
    ours = grads_of(model.model)
    model.zero_grad()
    for x, dropped in zip(batch(7, 6).tensor_split(3), output.tensor_split(3), strict=True):
        total(module[0](x) * (dropped != 0) * 2.0, None).backward()
    assert_same(ours, grads_of(module))


def test_without_preserved_rng_state_recomputation_draws_anew(models: Models) -> None:
    def run(preserve: bool, plan: ModelExecutePlan) -> Any:
        config = RoundPipeRunConfig(preserve_rng_state=preserve, execute_plan=plan)
        return run_fused(models, lambda: drawing("dropout"), 2, config)

    kept, anew = run(True, RECOMPUTED), run(False, RECOMPUTED)
    assert_same(anew[0], kept[0], "losses and outputs of the first call")
    assert not torch.equal(anew[-2]["0.linear.weight"], kept[-2]["0.linear.weight"])
    assert_same(run(False, RECOMPUTED), anew, "drawing anew is repeatable too")
    assert_same(run(False, ONE_STAGE), kept, "where nothing is recomputed nothing changes")


def test_forward_and_backward_draw_alike_on_every_device_count(models: Models) -> None:
    results = []
    for num_devices in DEVICE_COUNTS:
        model = models.wrap(seeded(dropping), num_devices)
        torch.manual_seed(5)
        outputs = [model(batch(7, 4, 6), roundpipe_run_config=microbatches(3)) for _ in range(2)]
        for output in reversed(outputs):
            total(output, None).backward()
        model.synchronize()
        results.append([*[o.detach() for o in outputs], grads_of(model.model), torch.rand(2)])
        assert_same(results[-1], results[0], f"{num_devices} devices")


def test_evaluation_draws_nothing(models: Models, num_devices: int) -> None:
    module = seeded(dropping).eval()
    model = models.wrap(module, num_devices)
    with torch.no_grad():
        expected = torch.cat([module(x) for x in batch(7, 4, 6).tensor_split(3)])
        assert_same(model(batch(7, 4, 6), roundpipe_run_config=microbatches(3)), expected)


def test_a_layer_with_a_generator_of_its_own_uses_it(models: Models) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = Drawing(lambda x: x * 0 + torch.rand(6, generator=generator))
    model = models.wrap(nn.Sequential(layer), 1)
    with torch.no_grad():
        output = model(batch(1, 6), roundpipe_run_config=microbatches(1))
    assert torch.equal(output[0], torch.rand(6, generator=torch.Generator().manual_seed(1)))


def test_loss_fn_draws_alike_on_every_device_count(models: Models) -> None:
    losses = []
    for num_devices in DEVICE_COUNTS:
        model = models.wrap(seeded(lambda: nn.Linear(6, 6)), num_devices)
        torch.manual_seed(5)
        loss = model.forward_backward(
            (batch(7, 6),), loss_fn=lambda o, y: (o * torch.rand_like(o)).sum(), run_config=microbatches(3)
        )
        losses.append((loss, torch.rand(2)))
        assert_same(losses[-1], losses[0], f"{num_devices} devices")


def test_the_main_thread_draws_undisturbed_while_layers_draw(models: Models) -> None:
    """While backward is still running (it waits for this test), the main thread's sequence is its own."""
    sequences = []
    for num_devices in (1, 2, 8):
        may_go_on, begun = threading.Event(), threading.Event()

        def hold(grad: Tensor, begun: threading.Event = begun, may_go_on: threading.Event = may_go_on) -> Tensor:
            begun.set()
            assert may_go_on.wait(WAIT_S)
            return grad

        def draw(x: Tensor, hold: Callable[[Tensor], Tensor] = hold) -> Tensor:
            y = nn.functional.dropout(x, 0.3) + torch.normal(x.detach(), x.detach().abs())
            if y.requires_grad:
                y.register_hook(hold)
            return y

        def build(draw: Callable[[Tensor], Tensor] = draw) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), Drawing(draw), nn.Linear(6, 6))

        model = models.wrap(seeded(build), num_devices)
        if num_devices == 1:
            may_go_on.set()  # one device runs everything in one stage: the losses come after the backward
        torch.manual_seed(11)
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=RECOMPUTED)
        model.forward_backward((batch(7, 6),), label=batch(7, 6), loss_fn=mse, run_config=config)
        drawn = [torch.rand(3), torch.randperm(5)]
        assert begun.wait(WAIT_S)
        drawn += [torch.randn(3) for _ in range(20)]
        may_go_on.set()
        drawn += [torch.rand(3) for _ in range(20)]
        model.synchronize()
        sequences.append([*drawn, torch.rand(1)])
        assert_same(sequences[-1], sequences[0], f"{num_devices} devices")
