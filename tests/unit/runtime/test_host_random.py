"""An observed stream: every random CPU operation of torch draws from the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers_parity import assert_same
from roundpipe.errors import UsageError
from roundpipe.runtime.rng import RandomStream, route_shared_generators

X = torch.linspace(0.1, 0.9, 24).reshape(4, 6)
DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(2, 3),
    "randint": lambda: torch.randint(0, 100, (7,)),
    "randint with one bound": lambda: torch.randint(50, (7,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 100),
    "randint_like with two bounds": lambda: torch.randint_like(X, 5, 50),
    "normal_": lambda: torch.empty(4).normal_(),
    "uniform_": lambda: torch.empty(4).uniform_(),
    "bernoulli": lambda: torch.bernoulli(X),
    "multinomial": lambda: torch.multinomial(X, 3),
    "poisson": lambda: torch.poisson(X * 10),
    "normal": lambda: torch.normal(X, X),
    "dropout": lambda: nn.functional.dropout(X, 0.5),
    "alpha dropout": lambda: nn.functional.alpha_dropout(X, 0.5, training=True),
    "feature dropout": lambda: nn.functional.dropout1d(X, 0.5),
    "rrelu": lambda: nn.functional.rrelu(X - 0.5, training=True),
    "gumbel softmax": lambda: nn.functional.gumbel_softmax(X),
    "dropout module": lambda: nn.Dropout(0.3)(X),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "rand into a tensor": lambda: torch.rand(5, out=torch.empty(5)),
    "randint into a tensor": lambda: torch.randint(3, 50, (7,), out=torch.empty(7, dtype=torch.int64)),
    "randperm into a tensor": lambda: torch.randperm(9, out=torch.empty(9, dtype=torch.int64)),
    "the shared generator": lambda: torch.rand(5, generator=torch.default_generator),
    "the shared generator by position": lambda: torch.poisson(X * 10, torch.default_generator),
}


def torch_stream(seed: int) -> RandomStream:
    return RandomStream(seed, is_observed=True)


def drawn(draw: Callable[[], Any], seed: int) -> Any:
    with torch_stream(seed) as stream:
        value = draw()
    assert stream.drew
    return value


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_depend_on_the_seed_only(name: str) -> None:
    torch.manual_seed(0)
    first = drawn(DRAWS[name], 7)
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(drawn(DRAWS[name], 7), first)
    others = [drawn(DRAWS[name], seed) for seed in range(8, 14)]
    assert any(not torch.equal(other, first) for other in others)


@pytest.mark.parametrize("name", DRAWS)
def test_the_default_generator_is_unchanged(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn(DRAWS[name], 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_successive_draws_of_a_stream_differ() -> None:
    with torch_stream(3):
        assert not torch.equal(torch.rand(4), torch.rand(4))


def test_drew_is_false_for_operations_that_do_not_draw() -> None:
    with torch_stream(3) as stream:
        (X @ X.t()).relu()
        nn.functional.dropout(X, 0.5, training=False)
        nn.functional.scaled_dot_product_attention(X[None], X[None], X[None])
    assert not stream.drew


def test_an_explicit_generator_is_used() -> None:
    own = torch.Generator().manual_seed(11)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(11))
    with torch_stream(3):
        assert torch.equal(torch.rand(4, generator=own), expected)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_with_probability_0_and_1(probability: float) -> None:
    with torch_stream(3):
        kept = nn.functional.dropout(X, probability)
    assert torch.equal(kept, X if probability == 0.0 else torch.zeros_like(X))


def test_dropout_scales_and_backpropagates() -> None:
    x = X.clone().requires_grad_()
    with torch_stream(3):
        y = nn.functional.dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None
    kept = y.detach() != 0
    assert torch.equal(y.detach()[kept], (X / 0.75)[kept]) or torch.allclose(y.detach()[kept], (X / 0.75)[kept])
    assert torch.equal(x.grad != 0, kept)


def test_threads_do_not_disturb_each_other() -> None:
    """This includes operations that use the default generator with a swapped state."""
    names = ["rand", "normal", "multinomial", "rrelu", "alpha dropout"]
    expected = {name: drawn(DRAWS[name], 7) for name in names}
    wrong: list[str] = []
    barrier = threading.Barrier(len(names))

    def draw(name: str) -> None:
        barrier.wait(30)
        for _ in range(30):
            if not torch.equal(drawn(DRAWS[name], 7), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=draw, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_operation_that_takes_no_generator_is_refused() -> None:
    library = torch.library.Library("roundpipe_tests", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", lambda x: x + torch.rand(()), "CPU")
    with torch_stream(3), pytest.raises(UsageError, match=r"roundpipe_tests\.noise.*Give the operation a `generator`"):
        torch.ops.roundpipe_tests.noise(X)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_again(use_reentrant: bool) -> None:
    """Its recomputation runs inside of a backward, which has another stream."""
    route_shared_generators()
    found = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        x = X.clone().requires_grad_()
        torch.manual_seed(5)
        with torch_stream(3):
            first = torch.rand(2)
            y = run(lambda value: nn.functional.dropout(value, 0.5).square() * torch.rand(()), x)
            last = torch.rand(2)
        with torch_stream(4):
            before = torch.get_rng_state()
            y.sum().backward()
            assert torch.equal(torch.get_rng_state(), before)
        found.append([first, y.detach(), last, x.grad, torch.rand(2)])
    assert_same(found[1], found[0])
