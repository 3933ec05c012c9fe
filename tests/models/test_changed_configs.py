"""A wrapped model follows its config: options that the user changes between calls, and what a forward notes in it."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from small_models import assert_close_grads, labelled, small, tokens
from sweep import build
from test_caches_and_captures import with_features
from torch import Tensor, nn

from helpers_parity import assert_same, microbatches
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.split.transformers import TESTED_RELEASES, warn_of_untested_release

transformers = pytest.importorskip("transformers")

ROUNDING = 1e-5


def wrap(model: nn.Module) -> RoundPipe:
    wrapped = wrap_model_to_roundpipe(model, True, devices=["cpu"] * 2, model_run_config=microbatches(2))
    assert isinstance(wrapped, RoundPipe)
    return wrapped


def assert_trains_alike(model: RoundPipe, plain: Any, batch: dict[str, Any]) -> Tensor:
    plain.zero_grad()
    model.zero_grad()
    expected = plain(**copy.deepcopy(batch)).loss
    expected.backward()
    torch.testing.assert_close(model.forward_backward(input_kwargs=batch), expected, rtol=ROUNDING, atol=0)
    model.synchronize()
    assert_close_grads(model, plain, ROUNDING)
    return expected.detach()


def test_a_feature_layer_that_is_changed_between_calls_counts_from_then_on() -> None:
    plain, batch, _ = build(with_features("llava", -1))
    with wrap(build(with_features("llava", -1))[0]) as model:
        losses = []
        for layer in (-1, -2, 1, -1):
            for each in (plain, model.original_model):
                each.config.vision_feature_layer = layer
            losses.append(assert_trains_alike(model, plain, batch).item())
    assert len(set(losses)) == 3


def test_a_router_loss_that_is_turned_on_between_calls_is_added() -> None:
    plain, batch = small("mixtral", router_aux_loss_coef=0.1), labelled("mixtral")
    with wrap_model_to_roundpipe(small("mixtral", router_aux_loss_coef=0.1), True, devices=["cpu"] * 2) as model:
        losses = []
        for is_on in (False, True, False):
            for each in (plain, model.original_model):
                each.config.output_router_logits = is_on
            found = model.forward_backward(input_kwargs=batch, run_config=microbatches(1))
            assert_same(found, plain(**batch).loss.detach())
            losses.append(found.item())
    assert losses[0] == losses[2] != losses[1]


LABELS: dict[str, tuple[int, Tensor, str]] = {
    "classes": (3, torch.tensor([0, 2, 1, 2]), "single_label_classification"),
    "several classes": (3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]]), "multi_label_classification"),
    "numbers": (1, torch.tensor([0.3, -1.0, 2.0, 0.5]), "regression"),
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_classifier_computes_the_loss_for_the_kind_of_labels_that_the_user_has(kind: str) -> None:
    """The model notes the kind in its config when it first gets labels; those must be the user's."""
    num_labels, labels, noted = LABELS[kind]

    def classifier() -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(3)
        config = transformers.BertConfig(**sizes, vocab_size=97, num_labels=num_labels)
        return transformers.BertForSequenceClassification(config).eval()

    plain, batch = classifier(), {"input_ids": tokens(4, 7), "labels": labels}
    with wrap(classifier()) as model:
        assert model.original_model.config.problem_type is None
        for _ in range(2):
            assert_trains_alike(model, plain, batch)
        assert model.original_model.config.problem_type == plain.config.problem_type == noted


@pytest.mark.parametrize(("release", "is_tested"), [("5.16.1", False), ("5.17.0", True), ("6.0.0.dev0", False)])
def test_an_untested_release_of_transformers_is_named_once(
    release: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_untested_release.cache_clear()
    wrap(small("llama")).close()
    assert warn_of_untested_release.cache_info().currsize == 1, "wrapping does not look at the release"
    warn_of_untested_release.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=release))
    for _ in range(2):
        warn_of_untested_release()
    warn_of_untested_release.cache_clear()
    oldest, newest = (".".join(map(str, tested)) for tested in TESTED_RELEASES)
    warning = f"transformers {release} is not a release that this version of RoundPipe was tested with"
    assert caplog.text.count(f"{warning} ({oldest} to {newest})") == (0 if is_tested else 1)
