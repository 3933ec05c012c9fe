"""The sweep's verdicts on made-up gradients: errors are found and named."""

from __future__ import annotations

import torch
from sweep import Outcome, Trained, Verdict, compare, demanded_outcome
from tiny_cases import case_named
from torch import Tensor

GRADS: dict[str, Tensor | None] = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-4]), "unused": None}
PLAIN = Trained(torch.tensor(3.0), GRADS)
NEAR = torch.tensor([1.0, 2.0 + 1e-5])


def verdict_of(loss: float = 3.0, shared: frozenset[str] = frozenset(), **changed: Tensor | None) -> Verdict:
    return compare(Trained(torch.tensor(loss), GRADS | changed, shared), PLAIN)


def test_equal_to_the_last_bit_is_bitwise() -> None:
    assert verdict_of() == Verdict(Outcome.BITWISE)


def test_rounding_is_allowed_for_in_units_of_the_largest_gradient() -> None:
    assert verdict_of(a=NEAR).outcome is Outcome.EXACT
    assert verdict_of(b=torch.tensor([1.1e-4])).outcome is Outcome.EXACT
    assert verdict_of(loss=3.00001).outcome is Outcome.EXACT


def test_rounding_of_shared_parameters_alone_has_its_own_outcome() -> None:
    assert verdict_of(a=NEAR, shared=frozenset("a")).outcome is Outcome.BITWISE_UNLESS_SHARED
    assert verdict_of(a=NEAR, shared=frozenset("b")).outcome is Outcome.EXACT
    assert verdict_of(a=NEAR, loss=3.00001, shared=frozenset("a")).outcome is Outcome.EXACT


def test_everything_else_is_wrong_and_named() -> None:
    wrong: dict[str, list[Tensor | None]] = {
        "a": [None, torch.tensor([1.0, 2.001]), torch.tensor([1.0, float("nan")]), NEAR.double(), torch.ones(3)],
        "unused": [torch.zeros(2)],
    }
    for name, grads in wrong.items():
        for grad in grads:
            verdict = compare(Trained(torch.tensor(3.0), GRADS | {name: grad}, frozenset("a")), PLAIN)
            assert verdict.outcome is Outcome.WRONG, grad
            assert name in verdict.detail
    assert verdict_of(loss=3.001).outcome is Outcome.WRONG
    assert verdict_of(loss=float("nan")).outcome is Outcome.WRONG
    assert verdict_of(another=torch.ones(1)).outcome is Outcome.WRONG


def test_several_microbatches_demand_less_of_shared_parameters_and_of_nothing_else() -> None:
    bitwise, exact = case_named("bert:BertForMaskedLM"), case_named("swin:SwinForImageClassification")
    assert demanded_outcome(bitwise, 1) is Outcome.BITWISE
    assert demanded_outcome(bitwise, 2) is Outcome.BITWISE_UNLESS_SHARED
    assert demanded_outcome(exact, 1) is demanded_outcome(exact, 2) is Outcome.EXACT


def test_a_refusal_needs_a_reason() -> None:
    assert Verdict(Outcome.REFUSED, reason="why").is_enough_for(Outcome.REFUSED)
    assert not Verdict(Outcome.REFUSED).is_enough_for(Outcome.REFUSED)
    assert not Verdict(Outcome.REFUSED, reason="why").is_enough_for(Outcome.EXACT)
