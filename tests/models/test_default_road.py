"""Training the way of users, in `make test`: a sample of classes and variants, and that the comparison finds errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import default_road
import pytest
import torch
from default_road import Job, Trained, check_default_road, train_plain
from in_double import in_double, without_float32
from sweep import Holds, missing_packages
from tiny_cases import Case, case_named, load_cases
from variants import sample, shuffled_variants, variants_of

pytest.importorskip("transformers")

CLASSES = {
    "llama:LlamaForCausalLM": Holds.WHOLE_BATCH,
    "llava:LlavaForConditionalGeneration": Holds.WHOLE_BATCH,
    "t5:T5ForConditionalGeneration": Holds.WHOLE_BATCH,
    "bert:BertForQuestionAnswering": Holds.WHOLE_BATCH,
    "bert:BertForPreTraining": Holds.MICROBATCHES,  # two losses: a mean over labels and one over rows
    "doge:DogeForCausalLM": Holds.MICROBATCHES,  # rows influence each other
    "mixtral:MixtralForCausalLM+router": Holds.ROUTER,
}
NUM_VARIANTS = 12


@pytest.mark.parametrize("key", CLASSES)
def test_a_class_trains_the_way_of_users(key: str) -> None:
    verdict = check_default_road(case_named(key), 3)
    assert verdict.holds is CLASSES[key], verdict.detail


TESTABLE = [case for case in load_cases() if not missing_packages(case)]


@pytest.mark.parametrize("case", sample(TESTABLE, NUM_VARIANTS), ids=str)
def test_a_variant_trains_the_way_of_users(case: Case) -> None:
    """The first variant, in a random order, that the plain model takes."""
    for variant in shuffled_variants(case)[:8]:
        verdict = check_default_road(variant, 2)
        assert verdict.holds is not Holds.WRONG, f"{variant}: {verdict.detail}"
        if verdict.holds.is_tried:
            return


@pytest.mark.slow
def test_made_up_inputs_do_not_change_a_model_that_exchanges_its_attention_for_short_ones() -> None:
    variants = variants_of(case_named("big_bird:BigBirdForCausalLM"))
    variant = next(each for each in variants if each.key.endswith("[use_bias=False]"))
    assert check_default_road(variant, 2).holds is Holds.WHOLE_BATCH


def variant_named(key: str) -> Case:
    case = case_named(key.partition("[")[0])
    if missing := missing_packages(case):
        pytest.skip(f"needs {', '.join(missing)}")
    return next(each for each in variants_of(case) if each.key == key)


@pytest.mark.slow
def test_heads_inside_the_decoder_may_be_changed_in_place() -> None:
    variant = variant_named("deformable_detr:DeformableDetrForObjectDetection[with_box_refine=True]")
    assert check_default_road(variant, 2).holds is Holds.WHOLE_BATCH


# The comparison itself.

ROUNDED = "pp_formulanet:PPFormulaNetForConditionalGeneration[text_config.decoder_layers=2]"
ROUNDED_WITH_CASTS = "gemma4:Gemma4ForConditionalGeneration[audio_config.num_hidden_layers=1]"


@pytest.mark.parametrize("key", [ROUNDED, pytest.param(ROUNDED_WITH_CASTS, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_rounding_is_found_by_repeating_in_float64(key: str) -> None:
    verdict = check_default_road(variant_named(key), 2)
    assert verdict.holds is Holds.WHOLE_BATCH, verdict.detail
    assert verdict.detail.startswith("in float64"), "in float32 it differs by more than sums usually do"


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1 + 1e-9), (torch.float32, 1 + 1e-3)])
def test_an_error_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float) -> None:
    """An error shows in float64, where rounding is smaller, or as a difference from the plain microbatches."""
    train = default_road.train_wrapped

    def off(job: Job, number: int) -> Iterator[tuple[str, Trained]]:
        for road, got in train(job, number):
            is_off = next(job.built.parameters()).dtype is dtype
            grads = {name: grad if grad is None else grad * factor for name, grad in got.grads.items()}
            yield road, Trained(got.loss, grads if is_off else got.grads)

    monkeypatch.setattr(default_road, "train_wrapped", off)
    verdict = check_default_road(variant_named(ROUNDED), 2)
    assert verdict.holds is Holds.WRONG
    assert ("in float64" in verdict.detail) is (dtype is torch.float64)


def test_float32_is_nowhere_in_a_comparison_in_float64() -> None:
    numbers = torch.ones(2, dtype=torch.float64)
    with without_float32():
        made = [numbers.float(), numbers.to(torch.float32), numbers.to("cpu", dtype=torch.float32), torch.zeros(1)]
        made += [torch.nn.functional.softmax(numbers, dim=0, dtype=torch.float32), *in_double([torch.ones(1)])]
    assert {each.dtype for each in made} == {torch.float64}
    assert numbers.float().dtype is torch.zeros(1).dtype is torch.float32


def results(loss: float = 1.0, gradient: float = 1.0) -> Iterator[tuple[str, Trained]]:
    """Results of a wrapped llama that are off by factors."""
    job = Job.of(case_named("llama:LlamaForCausalLM"))
    assert job is not None
    whole = train_plain(job, [job.batch], [1.0])
    name = "model.layers.0.mlp.up_proj.weight"
    scaled = {**whole.grads, name: whole.grads[name] * gradient}  # type: ignore[operator]
    yield "forward_backward", whole
    yield "backward", Trained(whole.loss * loss, scaled)


@pytest.mark.parametrize(("loss", "gradient"), [(1.0001, 1.0), (1.0, 1.01), (1.0, 0.0), (float("nan"), 1.0)])
def test_wrong_losses_and_gradients_are_found(monkeypatch: pytest.MonkeyPatch, loss: float, gradient: float) -> None:
    monkeypatch.setattr(default_road, "train_wrapped", lambda job, number: results(loss, gradient))
    assert check_default_road(case_named("llama:LlamaForCausalLM"), 2).holds is Holds.WRONG
    monkeypatch.setattr(default_road, "train_wrapped", lambda job, number: results())
    assert check_default_road(case_named("llama:LlamaForCausalLM"), 2).holds is Holds.WHOLE_BATCH


def test_the_results_of_microbatches_need_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_named("bert:BertForPreTraining")
    assert check_default_road(case, 2).holds is Holds.MICROBATCHES
    monkeypatch.setattr(logging.getLogger("roundpipe"), "disabled", True)
    assert check_default_road(case, 2).holds is Holds.WRONG


def test_an_exception_of_the_wrapped_model_alone_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, number: int) -> Iterator[tuple[str, Trained]]:
        raise IndexError("only here")

    monkeypatch.setattr(default_road, "train_wrapped", fail)
    with pytest.raises(IndexError, match="only here"):
        check_default_road(case_named("llama:LlamaForCausalLM"), 2)


def test_variants_differ_from_their_case_in_one_option() -> None:
    keys = [variant.key for variant in variants_of(case_named("llava:LlavaForConditionalGeneration"))]
    assert len(set(keys)) == len(keys)
    for option in ("vision_feature_layer=-2", "text_config.attention_bias=True", "vision_config.num_hidden_layers=1"):
        assert any(key.endswith(f"[{option}]") for key in keys), (option, keys)
