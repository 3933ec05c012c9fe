"""KeptRoutes: a recomputed block sends each token to the experts that its forward pass chose, despite rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.context import LayerPhase, LayerRun
from roundpipe.split.determinism import ChoicesSeen, KeptRoutes

SCORES = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.6], [0.3, 0.4, 0.8]])
Choose = Callable[[Tensor], Any]
WAYS: dict[str, Choose] = {
    "function": lambda x: torch.topk(x, 2),
    "method": lambda x: x.topk(2),
    "named": lambda x: torch.topk(input=x, k=2, dim=-1),
    "first dimension": lambda x: x.topk(2, dim=0),
    "smallest": lambda x: torch.topk(x, 2, -1, False),
    "unsorted": lambda x: x.topk(k=2, sorted=False),
    "largest": lambda x: torch.max(x, dim=-1, keepdim=True),
    "largest of the first dimension": lambda x: x.max(0, True),
}
WITHOUT_VALUES: dict[str, Choose] = {
    "argmax": lambda x: torch.argmax(x, dim=-1),
    "argmax, kept": lambda x: x.argmax(-1, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
}


def run(phase: LayerPhase, scores: Tensor, choose: Choose, data: tuple[Any, ...] | None = None) -> tuple[Any, Any]:
    """Run a choice inside a layer; returns the choice and the data saved for recomputation."""
    layer = LayerRun(phase, data)
    with layer:
        routes = KeptRoutes()
        with routes:
            found = choose(scores)
        routes.save()
    return found, layer.recompute_data


@pytest.mark.parametrize("way", WAYS)
def test_the_choice_of_the_forward_is_used_again_on_new_scores(way: str) -> None:
    choose = WAYS[way]
    first, saved = run(LayerPhase.FORWARD, SCORES, choose)
    expected = choose(SCORES)
    assert torch.equal(first.indices, expected.indices)
    assert torch.equal(first.values, expected.values)
    other = SCORES.flip(0).flip(1) * 3
    assert not torch.equal(choose(other).indices, expected.indices), "the scores would choose otherwise"
    again, _ = run(LayerPhase.RECOMPUTE, other, choose, saved)
    assert torch.equal(again.indices, expected.indices)
    dim = 0 if "first dimension" in way else -1
    assert torch.equal(again.values, other.gather(dim, expected.indices))


@pytest.mark.parametrize("way", WITHOUT_VALUES)
def test_the_argmax_of_the_forward_is_used_again(way: str) -> None:
    choose = WITHOUT_VALUES[way]
    first, saved = run(LayerPhase.FORWARD, SCORES, choose)
    assert torch.equal(first, choose(SCORES))
    assert not torch.equal(choose(-SCORES), first), "the scores would choose otherwise"
    again, _ = run(LayerPhase.RECOMPUTE, -SCORES, choose, saved)
    assert torch.equal(again, first)


def test_max_without_keepdim() -> None:
    first, saved = run(LayerPhase.FORWARD, SCORES, lambda x: x.max(1))
    again, _ = run(LayerPhase.RECOMPUTE, -SCORES, lambda x: x.max(1), saved)
    assert torch.equal(again.indices, SCORES.max(1).indices)
    assert torch.equal(again.values, -first.values)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_flow_through_the_chosen_values(way: str) -> None:
    choose = WAYS[way]
    _, saved = run(LayerPhase.FORWARD, SCORES, choose)
    ours, plain = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    again, _ = run(LayerPhase.RECOMPUTE, ours, choose, saved)
    expected = choose(plain)
    weights = torch.arange(float(expected.values.numel())).view_as(expected.values)
    (again.values * weights).sum().backward()
    (expected.values * weights).sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_several_choices_in_one_block_keep_their_order() -> None:
    def twice(scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.topk(1).indices, (-scores).topk(2).indices

    first, saved = run(LayerPhase.FORWARD, SCORES, twice)
    again, _ = run(LayerPhase.RECOMPUTE, SCORES.flip(1), twice, saved)
    assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))


def test_results_can_be_unpacked_and_asked_by_name() -> None:
    _, saved = run(LayerPhase.FORWARD, SCORES, WAYS["function"])
    again, _ = run(LayerPhase.RECOMPUTE, SCORES, WAYS["function"], saved)
    values, indices = again
    assert torch.equal(values, again.values)
    assert torch.equal(indices, again.indices)


@pytest.mark.parametrize("phase", [LayerPhase.FUSED, LayerPhase.INFERENCE])
def test_without_recomputation_nothing_is_saved(phase: LayerPhase) -> None:
    found, saved = run(phase, SCORES, WAYS["method"])
    assert saved is None
    assert torch.equal(found.indices, SCORES.topk(2).indices)


def test_outside_of_layers_top_k_is_unchanged() -> None:
    with KeptRoutes() as routes:
        found = SCORES.topk(2)
    routes.save()
    assert torch.equal(found.indices, SCORES.topk(2).indices)


def test_other_functions_are_unchanged() -> None:
    def others(scores: Tensor) -> tuple[Any, ...]:
        return scores.sort().indices, scores.max(), torch.max(scores, -scores), scores.softmax(-1)

    found, saved = run(LayerPhase.FORWARD, SCORES, others)
    assert saved == ()
    assert all(torch.equal(left, right) for left, right in zip(found, others(SCORES), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_choice_is_noticed(way: str) -> None:
    with ChoicesSeen() as seen:
        SCORES.softmax(-1).sort()
    assert not seen.seen
    with ChoicesSeen() as seen:
        found = WAYS[way](SCORES)
    assert seen.seen
    assert torch.equal(found.indices, WAYS[way](SCORES).indices)
