"""Taint: results get the labels of the tensors they are computed from, and reading a labelled value is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.split.dependence import Labels, Taint
from roundpipe.split.determinism import WithoutDropout

A, B, DRAWN = ("a",), ("b",), ("drawn",)


class Followed:
    def __init__(self) -> None:
        self.read: set[Any] = set()
        self.taint = Taint(self.read.update, lambda: frozenset([DRAWN]))
        self.a, self.b, self.plain = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
        self.taint.mark(self.a, frozenset([A]))
        self.taint.mark(self.b, frozenset([B]))

    def labels(self, compute: Callable[[Tensor, Tensor, Tensor], Any]) -> Labels:
        with self.taint.following():
            return self.taint.labels_of(compute(self.a, self.b, self.plain))


def in_place(a: Tensor, b: Tensor, plain: Tensor) -> Tensor:
    total = torch.zeros_like(plain)
    total[1].add_(a[0])
    return total


def by_out(a: Tensor, b: Tensor, plain: Tensor) -> Tensor:
    total = torch.zeros_like(plain)
    torch.add(a, plain, out=total)
    return total


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


FROM_A: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "arithmetic": lambda a, b, plain: a * 2 + plain,
    "a product with zero": lambda a, b, plain: a * 0,
    "a view": lambda a, b, plain: a.view(-1)[3:],
    "a choice": lambda a, b, plain: a.argmax(-1),
    "top-k": lambda a, b, plain: a.topk(2).indices,
    "a comparison": lambda a, b, plain: (a > 100) | (plain > 0),
    "without grad": lambda a, b, plain: a.detach().clone(),
    "in place": in_place,
    "a given result": by_out,
    "a module": lambda a, b, plain: nn.LayerNorm(4)(a),
    "an autograd function": lambda a, b, plain: Twice.apply(a.clone().requires_grad_()),
    "an index": lambda a, b, plain: plain[:, a.argmax(-1)],
    "nested results": lambda a, b, plain: {"x": [plain, (a + 1,)]},
}
FROM_NOTHING: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "the other one": lambda a, b, plain: plain * 2,
    "a shape": lambda a, b, plain: torch.ones(a.shape),
    "zeros of that shape": lambda a, b, plain: torch.zeros_like(a) + a.new_ones(4),
    "a number": lambda a, b, plain: a.dim(),
}


@pytest.mark.parametrize("how", FROM_A)
def test_results_have_the_label_of_what_they_are_computed_from(how: str) -> None:
    assert Followed().labels(FROM_A[how]) == {A}


@pytest.mark.parametrize("how", FROM_NOTHING)
def test_results_computed_without_labelled_tensors_have_no_label(how: str) -> None:
    followed = Followed()
    assert followed.labels(FROM_NOTHING[how]) == frozenset()
    assert not followed.read


def test_labels_add_up() -> None:
    assert Followed().labels(lambda a, b, plain: torch.stack([a, b])) == {A, B}


def test_nothing_is_traced_outside_of_following() -> None:
    followed = Followed()
    result = followed.a + 1
    assert followed.taint.labels_of(result) == frozenset()


READS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "item": lambda a, b, plain: a.sum().item(),
    "bool": lambda a, b, plain: 1 if a.sum() > 0 else 2,
    "float": lambda a, b, plain: float(a[0, 0]),
    "tolist": lambda a, b, plain: a.tolist(),
    "numpy": lambda a, b, plain: a.numpy(),
    "equal": lambda a, b, plain: torch.equal(a, plain),
    "allclose": lambda a, b, plain: torch.allclose(a, plain),
    "nonzero": lambda a, b, plain: (a > 0).nonzero().shape,
    "where": lambda a, b, plain: torch.where(a > 0),
    "a mask": lambda a, b, plain: plain[a > 0],
    "masked_select": lambda a, b, plain: plain.masked_select(a > 0),
    "iteration": lambda a, b, plain: [int(x) for x in a[0].argsort()],
}
NO_READS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "integers that index": lambda a, b, plain: plain[a.argmax(-1) % 3],
    "a mask of something else": lambda a, b, plain: a[plain > 0],
    "masked_select by something else": lambda a, b, plain: a.masked_select(plain > 0),
    "another one": lambda a, b, plain: plain.sum().item(),
    "iteration over rows": lambda a, b, plain: [row * 2 for row in a],
}


@pytest.mark.parametrize("how", READS)
def test_reading_a_value_is_reported(how: str) -> None:
    followed = Followed()
    followed.labels(READS[how])
    assert followed.read == {A}


@pytest.mark.parametrize("how", NO_READS)
def test_computing_is_not_reported_as_reading(how: str) -> None:
    followed = Followed()
    followed.labels(NO_READS[how])
    assert not followed.read


DRAWS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], bool]] = {
    "randn": (lambda a, b, plain: torch.randn(3) * plain[0, :3], True),
    "rand_like": (lambda a, b, plain: torch.rand_like(plain), True),
    "in place": (lambda a, b, plain: plain.clone().normal_(), True),
    "noise": (lambda a, b, plain: plain.clone().uniform_(0.9, 1.1), True),
    "dropout": (lambda a, b, plain: nn.functional.dropout(plain), True),
    "the module": (lambda a, b, plain: nn.Dropout(0.1)(plain), True),
    "dropout in place": (lambda a, b, plain: nn.functional.dropout(plain, inplace=True), True),
    "attention": (
        lambda a, b, plain: nn.functional.scaled_dot_product_attention(plain, plain, plain, dropout_p=0.1),
        True,
    ),
    "dropout in evaluation": (lambda a, b, plain: nn.functional.dropout(plain, training=False), False),
    "dropout of nothing": (lambda a, b, plain: nn.functional.dropout(plain, 0.0), False),
    "attention without": (lambda a, b, plain: nn.functional.scaled_dot_product_attention(plain, plain, plain), False),
}


@pytest.mark.parametrize("without_dropout", [True, False])
@pytest.mark.parametrize("how", DRAWS)
def test_random_results_are_labelled_even_without_dropout(how: str, without_dropout: bool) -> None:
    draw, draws = DRAWS[how]
    followed = Followed()
    if without_dropout:
        with WithoutDropout():
            found = followed.labels(draw)
    else:
        found = followed.labels(draw)
    assert found == (frozenset([DRAWN]) if draws else frozenset())


@pytest.mark.parametrize("how", ["dropout", "the module", "dropout of nothing", "dropout in evaluation"])
def test_without_dropout_returns_the_input_itself_exactly_where_dropout_would(how: str) -> None:
    draw, draws = DRAWS[how]
    given = torch.randn(3, 4)
    with WithoutDropout():
        result = draw(given, given, given)
    assert (result is given) is not draws
    assert torch.equal(result, given)
