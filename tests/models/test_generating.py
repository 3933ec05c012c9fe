"""`generate` of a wrapped model is the library's own loop over forwards on devices: the tokens are the plain model's.

Scoring and decoding by hand go the same way. Weights are large enough that tokens differ from step to step, so that a
cache that is not filled, or filled twice, shows in the next token.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import Batch, labelled, lora, plain_loss, plain_outputs, small, tokens, train_call, wrapped
from torch import Tensor, nn

from helpers_adam import NumpyAdamW
from helpers_parity import StalenessReference, assert_same, microbatches
from helpers_slow import slow_except
from roundpipe import RoundPipe, UsageError
from roundpipe.api import split_model
from roundpipe.api.split_model import ResidentForward
from roundpipe.optim import AdamW

transformers = pytest.importorskip("transformers")

NUM_NEW = 6
TYPES = ["llama", "gemma2", "qwen3", "t5", "mamba", "mixtral"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "without_cache": {"use_cache": False},
}


@pytest.fixture(autouse=True, params=["resident", "streamed"])
def way_to_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether all weights fit on one device, and so stay there, or are uploaded layer by layer for each token."""
    if request.param == "streamed":
        monkeypatch.setattr(split_model, "_WEIGHTS_SHARE", 0.0)
    return str(request.param)


def prompt(num_rows: int = 2, num_tokens: int = 9) -> Batch:
    """Longer than the sliding window; the first row is padded on the left."""
    ids = tokens(num_rows, num_tokens)
    ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generated(model: Any, inputs: Batch, **options: Any) -> Any:
    transformers.set_seed(7)
    return model.generate(**inputs, **{"max_new_tokens": NUM_NEW, "do_sample": False, **options})


def assert_varied(found: Tensor) -> None:
    """Require different tokens: a model that always generates the same token would pass every comparison."""
    assert min(len(set(row[-NUM_NEW:].tolist())) for row in found) > 1, found


@pytest.mark.parametrize("model_type", slow_except(("llama", "t5", "mamba"), TYPES))
def test_tokens_are_those_of_the_plain_model(model_type: str) -> None:
    plain = small(model_type, seed=8, tie_word_embeddings=False).eval()
    expected = {name: generated(plain, prompt(), **way) for name, way in WAYS.items()}
    assert_varied(expected["greedy"])
    with wrapped(copy.deepcopy(plain), 3) as model:
        for name, way in WAYS.items():
            assert_same(generated(model, prompt(), **way), expected[name], name)


@pytest.mark.parametrize("model_type", ["llama", "t5"])
def test_tokens_are_the_same_on_one_device(model_type: str) -> None:
    plain = small(model_type).eval()
    with wrapped(copy.deepcopy(plain), 1) as model:
        assert_same(generated(model, prompt()), generated(plain, prompt()))


@pytest.mark.parametrize("model_type", ["llama", "t5"])
def test_sampling_with_a_seed_gives_the_tokens_of_the_plain_model(model_type: str) -> None:
    plain = small(model_type).eval()
    options = {"do_sample": True, "temperature": 1.2, "top_k": 30}
    expected = generated(plain, prompt(), **options)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(generated(model, prompt(), **options), expected)


def test_sampling_with_a_seed_repeats_itself_on_any_number_of_devices() -> None:
    found = []
    for num_devices in (1, 3):
        with wrapped(small("llama").eval(), num_devices) as model:
            found.append(generated(model, prompt(), do_sample=True, top_k=30))
    assert_same(found[1], found[0])


def test_padding_on_the_left_changes_nothing() -> None:
    ids = tokens(1, 6)
    padded = torch.nn.functional.pad(ids, (4, 0))
    with wrapped(small("llama").eval()) as model:
        alone = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        beside = generated(model, {"input_ids": padded, "attention_mask": (padded != 0).long()})
    assert_same(beside[:, 4:], alone)


def test_scores_and_the_output_class_are_those_of_the_library() -> None:
    plain = small("gemma2").eval()
    options = {"return_dict_in_generate": True, "output_scores": True}
    expected = generated(plain, prompt(), **options)
    with wrapped(copy.deepcopy(plain)) as model:
        found = generated(model, prompt(), **options)
    assert type(found) is type(expected)
    assert_same((found.sequences, found.scores), (expected.sequences, expected.scores))


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=["static_cache", "prompt_lookup", "several_sequences"],
)
def test_other_ways_to_generate(options: dict[str, Any]) -> None:
    plain, inputs = small("llama").eval(), {"input_ids": tokens(1, 9).repeat(1, 2)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    expected = generated(plain, inputs, **options)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(generated(model, inputs, **options), expected)


def test_every_token_is_one_forward_on_devices_over_what_is_new(
    monkeypatch: pytest.MonkeyPatch, way_to_devices: str
) -> None:
    lengths: list[int] = []
    forward = ResidentForward.__call__

    def counted(self: ResidentForward, *args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ResidentForward, "__call__", counted)
    with wrapped(small("llama").eval()) as model:
        generated(model, prompt(num_tokens=9), min_new_tokens=NUM_NEW)
        assert lengths == [9] + [1] * (NUM_NEW - 1)
        lengths.clear()
        generated(model, prompt(num_tokens=9), min_new_tokens=3, max_new_tokens=3, use_cache=False)
        assert lengths == [9, 10, 11]


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return NumpyAdamW(params, lr=0.1)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_tokens_come_from_the_weights_that_other_calls_use(is_async: bool) -> None:
    """After an asynchronous step those of the step before it, as for every call; after synchronize() the newest."""
    reference = StalenessReference(small("llama"), make_optimizer)
    with wrapped(small("llama")) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.1)
        seen = [generated(model, prompt())]  # planned for before any step
        for iteration in range(3):
            batch = labelled("llama", seed=iteration)
            model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
            plain_loss(reference.module, batch)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            reference.step(is_async)
            seen.append(generated(reference.module, prompt()))
            assert_same(generated(model, prompt()), seen[-1], f"after step {iteration}")
        model.synchronize()
        reference.synchronize()
        newest = generated(reference.module, prompt())
        assert_same(generated(model, prompt()), newest, "after synchronize")
    assert not all(torch.equal(one, newest) for one in seen[:-1]), "training changes no token"
    assert torch.equal(seen[-1], newest) is not is_async


@pytest.mark.parametrize("kind", ["generating", "training"])
def test_a_call_of_a_new_form_after_an_asynchronous_step_reads_weights_one_step_old(kind: str) -> None:
    """As every call does; that its split plan is made only now must not change its results."""
    reference, batch = StalenessReference(small("llama"), make_optimizer), labelled("llama")
    with wrapped(small("llama")) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.1)
        for _ in range(2):
            model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
            plain_loss(reference.module, batch)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            reference.step(is_async=True)
        if kind == "generating":
            assert_same(generated(model, prompt()), generated(reference.module, prompt()))
        else:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            loss = model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
            assert_same(loss, plain_loss(reference.module, batch), "loss")


def test_generating_does_not_change_the_training_that_follows() -> None:
    """generate() makes its split plan at the first call, on the layers of training; gradients summed before it stay."""
    reference = StalenessReference(small("t5"), make_optimizer)
    with wrapped(small("t5")) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.1)
        for seed in (0, 2):
            for part in range(2):
                batch = labelled("t5", seed=seed + part)
                loss = model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
                expected = plain_loss(reference.module, batch)
                torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)  # `shared` is used in many layers
                generated(model, prompt())
                assert model.training
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            reference.step(is_async=False)
        assert_same(generated(model, prompt()), generated(reference.module, prompt()))


def test_a_model_with_adapters_generates() -> None:
    plain = lora(small("llama"), "q_proj", "v_proj").eval()
    expected = generated(plain, prompt())
    assert not torch.equal(expected, generated(small("llama").eval(), prompt())), "the adapter does nothing"
    with wrapped(copy.deepcopy(plain), 3) as model:
        assert_same(generated(model, prompt()), expected)


# By hand.


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mamba"])
def test_decoding_by_hand_with_a_cache_equals_plain(model_type: str) -> None:
    plain = small(model_type).eval()
    name = "cache_params" if model_type == "mamba" else "past_key_values"

    def decode(model: nn.Module) -> list[Tensor]:
        ids, cache, steps = tokens(2, 9), {}, []
        for _ in range(NUM_NEW):
            out = model(input_ids=ids, use_cache=True, **cache)
            steps.append(out.logits)
            ids, cache = out.logits[:, -1:].argmax(-1), {name: getattr(out, name)}
        return steps

    with torch.no_grad(), wrapped(copy.deepcopy(plain), 3) as model:
        assert_same(decode(model), decode(plain))


def test_a_cache_made_by_the_user_is_filled_in_place() -> None:
    plain, ids = small("llama").eval(), tokens(2, 9)
    with torch.no_grad(), wrapped(copy.deepcopy(plain), 3) as model:
        ours, cache = (transformers.DynamicCache(config=plain.config) for _ in range(2))
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
            found = model(input_ids=part, past_key_values=ours)
            expected = plain(input_ids=part, past_key_values=cache)
            assert found.past_key_values is ours
            assert_same(found.logits, expected.logits)
        assert ours.get_seq_length() == ids.shape[1]
        for mine, theirs in zip(ours.layers, cache.layers, strict=True):
            assert_same((mine.keys, mine.values), (theirs.keys, theirs.values))


@pytest.mark.parametrize("with_cache", [{"use_cache": True}, {"past_key_values": "a new one"}], ids=["flag", "object"])
def test_a_cache_is_refused_where_gradients_are_taken(with_cache: dict[str, Any]) -> None:
    if "past_key_values" in with_cache:
        with_cache = {"past_key_values": transformers.DynamicCache()}
    batch = labelled("llama")
    with wrapped(small("llama")) as model:
        with pytest.raises(UsageError, match=r"for generating, under torch\.no_grad"):
            model(**batch, **with_cache)
        with pytest.raises(UsageError, match=r"for generating, under torch\.no_grad"):
            model.forward_backward(input_kwargs={**batch, **with_cache})
        assert_same(train_call(model, batch), plain_loss(small("llama"), batch), "the next call")


@pytest.mark.parametrize(
    ("model_type", "output_class"),
    [
        ("llama", "CausalLMOutputWithPast"),
        ("gpt2", "CausalLMOutputWithCrossAttentions"),
        ("mixtral", "MoeCausalLMOutputWithPast"),
        ("bert", "MaskedLMOutput"),
        ("t5", "Seq2SeqLMOutput"),
    ],
)
def test_scoring_in_microbatches_gives_plain_logits_in_the_models_own_kind_of_output(
    model_type: str, output_class: str
) -> None:
    plain, batch = small(model_type).eval(), labelled(model_type, num_rows=5)
    with torch.no_grad(), wrapped(copy.deepcopy(plain), 3) as model:
        found = model(**batch, roundpipe_run_config=microbatches(4))
        expected = plain_outputs(plain, batch, 4) if model_type != "bert" else None
        whole = plain(**batch)
    assert type(found).__name__ == output_class
    assert found.keys() - {"past_key_values"} == whole.keys() - {"past_key_values"}
    if expected is not None:
        assert_same((found.loss, found.logits), (expected.loss, expected.logits))
    torch.testing.assert_close(found.logits, whole.logits, atol=1e-5, rtol=1e-5)
    assert found.logits.shape == (*(batch["labels"] if model_type == "t5" else batch["input_ids"]).shape, 97)


# Models that cannot.


def test_a_plain_sequential_cannot_generate_and_says_so() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    expected = pytest.raises(UsageError, match=r"two layers cannot generate: only models of transformers.*Generate")
    with RoundPipe(layers, devices=["cpu"], name="two layers") as model, expected:
        model.generate(torch.zeros(1, 4))


def test_a_model_without_generate_says_so() -> None:
    with wrapped(small("bert")) as model, pytest.raises(UsageError, match=r"BertForMaskedLM has no generate"):
        model.generate(tokens(1, 4))
