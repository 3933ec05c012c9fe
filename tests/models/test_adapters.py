"""PEFT models are wrapped as they are: adapters train as in a plain loop, frozen weights cost no more than themselves.

Weights of adapters are made large (LoRA's B is zero at first, and then A has no gradient). Adapters are used in one
layer each, so every comparison of training is exact.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    Batch,
    assert_close_grads,
    labelled,
    livened,
    plain_loss,
    plain_outputs,
    small,
    train_call,
    wrapped,
)
from torch import Tensor, nn

from helpers_adam import NumpyAdamW
from helpers_parity import StalenessReference, assert_same, assert_same_grads, assert_same_state, grads_of, microbatches
from helpers_slow import slow_except
from roundpipe import (
    ModelExecutePlan,
    ModelSplitError,
    RoundPipe,
    RoundPipeRunConfig,
    UsageError,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import AdamW

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CAUSAL, SEQ2SEQ = {"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_2_SEQ_LM"}
# Attention and feed-forward parts, fused or not; gpt2's are Conv1D, whose weights lie the other way round.
ADAPTED: dict[str, dict[str, Any]] = {
    "llama": {**CAUSAL, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "qwen3": {**CAUSAL, "target_modules": "all-linear"},
    "gemma2": {**CAUSAL, "target_modules": ["k_proj", "up_proj"], "use_rslora": True},
    "gpt2": {**CAUSAL, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "t5": {**SEQ2SEQ, "target_modules": ["q", "v", "wo"]},
    "bert": {"target_modules": ["query", "value", "output.dense"]},
    "vit": {"target_modules": ["q_proj", "fc1"]},
    "mixtral": {**CAUSAL, "target_modules": ["q_proj", "o_proj"]},
    "phi3": {**CAUSAL, "target_modules": ["qkv_proj", "gate_up_proj"]},
    "opt": {**CAUSAL, "target_modules": ["q_proj", "fc1", "fc2"]},
}


def adapted(model_type: str, base: nn.Module | None = None, **options: Any) -> Any:
    """A PeftModel with adapters of a rank that fills the optimizer kernel's vectors."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **ADAPTED[model_type], **options})
    return livened(peft.get_peft_model(base or small(model_type), config).train())


def is_adapter(name: str) -> bool:
    return "lora_" in name


def records_of(model: RoundPipe) -> list[Any]:
    return model._engine.store.parameters


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        caching = {} if "pixel_values" in batch else {"use_cache": False}
        logits: Tensor = model(**inputs, **caching).logits
    return logits


def assert_frozen_weights_cost_nothing(model: RoundPipe) -> None:
    """No gradient, no copy for the optimizer and no second memory for weights that are being made."""
    frozen = [record for record in records_of(model) if not record.param.requires_grad]
    assert len(frozen) > len(records_of(model)) // 4
    for record in frozen:
        found = (record.param.grad, record.gathered, record.master, record.back)
        assert found == (None, None, None, None), record.name


@pytest.mark.parametrize("model_type", slow_except(("llama", "gpt2", "t5", "mixtral"), ADAPTED))
def test_losses_and_gradients_of_adapters_are_those_of_the_plain_model(model_type: str) -> None:
    plain, batch = adapted(model_type), labelled(model_type, num_rows=5)
    with wrapped(copy.deepcopy(plain)) as model:
        for _ in range(2):
            assert_same(train_call(model, batch, 3), plain_loss(plain, batch, 3), "loss")
        assert_same_grads(model.original_model, plain)
        assert_frozen_weights_cost_nothing(model)
        found = grads_of(model.original_model)
    trained = {name for name, grad in found.items() if grad is not None}
    assert trained == {name for name in found if is_adapter(name)}
    assert all(found[name].abs().max() > 1e-6 for name in trained), "nothing is compared"


@pytest.mark.parametrize(
    ("model_type", "is_async"),
    slow_except(
        [("llama", False), ("mixtral", True), ("t5", False)],
        [("llama", False), ("llama", True), ("gpt2", False), ("t5", False), ("mixtral", True), ("bert", False)],
    ),
    ids=lambda value: value if isinstance(value, str) else "async" if value else "exact",
)
def test_training_adapters_equals_the_plain_loop(model_type: str, is_async: bool) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return NumpyAdamW(params, lr=0.01)

    reference = StalenessReference(adapted(model_type), make)
    before = {name: param.clone() for name, param in reference.module.named_parameters()}
    with wrapped(adapted(model_type)) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.01)
        for iteration in range(5):
            batch = labelled(model_type, seed=iteration)
            loss = model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
            assert_same(loss, plain_loss(reference.module, batch), f"loss {iteration}")
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            reference.step(is_async)
        model.synchronize()
        reference.synchronize()
        assert_same_state(model, reference.module)
        assert_frozen_weights_cost_nothing(model)
    for name, param in reference.module.named_parameters():
        assert torch.equal(param, before[name]) is not is_adapter(name), name


def test_the_optimizer_sees_adapters_only_and_keeps_moments_of_them_only() -> None:
    with wrapped(adapted("llama"), optim_dtype=torch.float32) as model:
        names = [name for name, _ in model.optim_named_parameters()]
        assert names == [name for name, _ in adapted("llama").named_parameters() if is_adapter(name)]
        optimizer = AdamW(model.optim_parameters(), lr=0.01)
        train_call(model, labelled("llama"))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        copies = {id(record.master): record for record in records_of(model) if record.master is not None}
        assert {id(param) for param in optimizer.state} == copies.keys()
        assert sorted(record.name for record in copies.values()) != []
        assert {record.param.requires_grad for record in copies.values()} == {True}
        moments = sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in optimizer.state.values())
        assert moments == 2 * sum(param.numel() for name, param in model.named_parameters() if is_adapter(name))


@pytest.mark.parametrize("way", ["without_grad", "with_grad", "forward_backward"])
def test_outputs_of_a_batch_are_merged_though_the_config_asks_for_a_cache(way: str) -> None:
    """A PeftModel does not name use_cache among its arguments; its base model would make a cache by default."""
    plain, batch = adapted("llama").eval(), labelled("llama")
    assert plain.config.use_cache
    expected = plain_outputs(plain, batch)
    with wrapped(copy.deepcopy(plain)) as model, torch.set_grad_enabled(way != "without_grad"):
        if way == "forward_backward":
            _, found = model.forward_backward(input_kwargs=batch, return_outputs=True, run_config=microbatches(2))
        else:
            found = model(**batch, roundpipe_run_config=microbatches(2))
    assert_same((found.loss.detach(), found.logits.detach()), (expected.loss, expected.logits))


def test_save_pretrained_writes_the_adapter_alone_and_it_loads_again(tmp_path: Path) -> None:
    batch = labelled("llama")
    with wrapped(adapted("llama")) as model:
        optimizer = AdamW(model.optim_parameters(), lr=0.05)
        for _ in range(3):
            train_call(model, batch)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))  # save_pretrained waits for the last one
        model.save_pretrained(tmp_path)
        expected = logits_of(model, batch)
    assert {path.name for path in tmp_path.iterdir()} - {"README.md"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = small("llama")
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < sum(p.nbytes for p in base.parameters()) / 3
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits_of(loaded, batch), expected, atol=1e-6, rtol=1e-6)  # two rows at a time and four
    assert (logits_of(adapted("llama"), batch) - expected).abs().max() > 1e-2, "it was not trained"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "vit"])
def test_merged_and_unmerged_give_the_same_logits(model_type: str) -> None:
    plain, batch = adapted(model_type), labelled(model_type)
    without = logits_of(copy.deepcopy(plain).unload(), batch)
    with wrapped(copy.deepcopy(plain)) as unmerged, wrapped(copy.deepcopy(plain).merge_and_unload()) as merged:
        found = logits_of(unmerged, batch)
        torch.testing.assert_close(logits_of(merged, batch), found, atol=1e-5, rtol=1e-5)
    assert (found - without).abs().max() > 0.1, "the adapters do nothing"


@pytest.mark.parametrize(
    ("model_type", "whole"),
    [("llama", "lm_head"), ("llama", "embed_tokens"), ("vit", "classifier"), ("llama", "input_layernorm")],
)
def test_modules_to_save_train_beside_the_adapters(model_type: str, whole: str, tmp_path: Path) -> None:
    plain, batch = adapted(model_type, modules_to_save=[whole]), labelled(model_type)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
        saved = [name for name, _ in model.optim_named_parameters() if not is_adapter(name)]
        assert saved
        assert all(f"{whole}.modules_to_save.default" in name for name in saved)
        model.save_pretrained(tmp_path)
        expected = logits_of(model, batch)
    loaded = peft.PeftModel.from_pretrained(small(model_type), tmp_path)
    torch.testing.assert_close(logits_of(loaded, batch), expected, atol=1e-6, rtol=1e-6)


def test_lora_dropout_is_the_same_when_recomputed_on_any_number_of_devices() -> None:
    def run(num_devices: int, **options: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        with wrapped(adapted("llama", lora_dropout=0.4), num_devices) as model:
            torch.manual_seed(11)
            loss = train_call(model, labelled("llama"), 3, **options)
            return loss, grads_of(model.original_model)

    expected = run(1)
    assert_same(run(3), expected, "three devices")
    assert_same(run(2, recompute_grain="layer"), expected, "recomputed by layer")
    assert (plain_loss(adapted("llama"), labelled("llama"), 3) - expected[0]).abs() > 0.01, "nothing is dropped"


def test_lora_dropout_draws_again_in_recomputation_what_forward_drew() -> None:
    """All stages but the fused one are recomputed; with one stage of everything nothing is."""
    grads = []
    for plan in (
        ModelExecutePlan([], [range(4)]),
        ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(2, 3), range(2)]),
    ):
        with wrapped(adapted("llama", lora_dropout=0.4)) as model:
            assert model.num_layers == 4
            torch.manual_seed(3)
            train_call(model, labelled("llama"), execute_plan=plan)
            grads.append(grads_of(model.original_model))
    assert_same(grads[1], grads[0], "recomputed")


def test_an_adapter_that_is_turned_off_is_off_in_the_wrapped_model() -> None:
    plain, batch = adapted("llama"), labelled("llama")
    with wrapped(copy.deepcopy(plain)) as model:
        with_adapter = logits_of(model, batch)
        for either in (plain, model.original_model):
            either.base_model.disable_adapter_layers()
        without = logits_of(model, batch)
        torch.testing.assert_close(without, logits_of(plain, batch), atol=1e-6, rtol=1e-6)
        assert (without - with_adapter).abs().max() > 0.1
        model.original_model.base_model.enable_adapter_layers()
        assert_same(logits_of(model, batch), with_adapter)


def test_the_second_of_two_adapters_trains_when_it_is_the_active_one() -> None:
    plain, batch = adapted("llama"), labelled("llama")
    plain.add_adapter("second", peft.LoraConfig(r=4, **ADAPTED["llama"]))
    plain.set_adapter("second")
    livened(plain)
    with wrapped(copy.deepcopy(plain)) as model:
        assert {".second." in name for name, _ in model.optim_named_parameters()} == {True}
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)


TARGETS = {"target_modules": ["q_proj", "v_proj"]}
OTHER_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dora": ("llama", "LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "experts": (
        "mixtral",
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "head_and_embedding": ("llama", "LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}),
    "some_tokens": ("llama", "LoraConfig", {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 9]}),
    "ia3": ("llama", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt_tuning": ("llama", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p_tuning": ("llama", "PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "adaption_prompt": ("llama", "AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 2}),
    "osf": ("llama", "OSFConfig", TARGETS),
    "oft": ("llama", "OFTConfig", {**TARGETS, "oft_block_size": 4, "r": 0}),
    "boft": ("llama", "BOFTConfig", TARGETS),
    "vera": ("llama", "VeraConfig", TARGETS),
    "vblora": ("llama", "VBLoRAConfig", {**TARGETS, "num_vectors": 8, "vector_length": 8, "topk": 2, "r": 4}),
    "loha": ("llama", "LoHaConfig", TARGETS),
    "lokr": ("llama", "LoKrConfig", TARGETS),
    "hra": ("llama", "HRAConfig", TARGETS),
    "randlora": ("llama", "RandLoraConfig", TARGETS),
    "fourierft": ("llama", "FourierFTConfig", {**TARGETS, "n_frequency": 20}),
    "layernorms": ("llama", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
}
ALWAYS = ("experts", "some_tokens", "prompt_tuning", "adaption_prompt", "osf", "vera")  # the others are slow tests


def with_adapter(kind: str) -> Any:
    """A PeftModel as PEFT makes it, with adapters that change its outputs."""
    model_type, config, options = OTHER_KINDS[kind]
    torch.manual_seed(2)
    model = peft.get_peft_model(small(model_type), getattr(peft, config)(**CAUSAL, **options)).train()
    return model if kind == "osf" else livened(model)  # OSF starts from the weights that it divides


def with_mask(batch: Batch) -> Batch:
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def whole_batch(plain: nn.Module, batch: Batch) -> Tensor:
    """The loss of the whole batch; its gradients are in `.grad` then, alone."""
    plain.zero_grad()
    loss: Tensor = plain(**batch).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", slow_except(ALWAYS, OTHER_KINDS))
def test_other_kinds_of_adapters_train_as_in_the_plain_model(kind: str) -> None:
    """To rounding: some are used by several layers. The models are built twice, because a deepcopy loses hooks."""
    plain = with_adapter(kind)
    with wrapped(with_adapter(kind), model_run_config=microbatches(2)) as model:
        gc.collect()  # copies that wrapping has made are gone
        for num_rows, num_tokens in ((4, 7), (6, 5)):
            batch = with_mask(labelled(OTHER_KINDS[kind][0], num_rows, num_tokens))
            expected = whole_batch(plain, batch)
            model.zero_grad()
            torch.testing.assert_close(model.forward_backward(input_kwargs=batch), expected, rtol=1e-6, atol=0)
            model.synchronize()
            assert_close_grads(model.original_model, plain, 2e-6)
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            assert_close_grads(model.original_model, plain, 2e-6)


@pytest.mark.parametrize("config", ["PrefixTuningConfig", "CartridgeConfig"])
def test_a_cache_that_is_trained_is_refused(config: str) -> None:
    """What blocks get is made of a parameter, and lies in an object that they write into."""
    plain = peft.get_peft_model(small("llama"), getattr(peft, config)(**CAUSAL, num_virtual_tokens=3))
    with pytest.raises(ModelSplitError, match="PeftModelForCausalLM cannot be wrapped: it trains a cache"):
        wrap_model_to_roundpipe(plain, devices=["cpu"])
    unsupported = pytest.raises(
        UsageError, match="Adapters that train a cache, such as prefix tuning, are not supported"
    )
    with wrap_model_to_roundpipe(plain, False, devices=["cpu"]) as model, unsupported:
        model(**with_mask(labelled("llama")))


def with_activated_adapter() -> Any:
    """aLoRA: the adapter acts from the last occurrence of its invocation tokens on, in each row from another place."""
    options = {"r": 4, "alora_invocation_tokens": [5, 6], **TARGETS}
    return livened(peft.get_peft_model(small("llama"), peft.LoraConfig(**CAUSAL, **options)).train())


def with_invocations(num_rows: int) -> Batch:
    batch = labelled("llama", num_rows, 9)
    for row in range(num_rows):
        batch["input_ids"][row, 1 + row : 3 + row] = torch.tensor([5, 6])
    return batch


def test_adapters_that_depend_on_the_row_run_in_one_microbatch_or_are_refused() -> None:
    plain = with_activated_adapter()
    hooks = [len(module._forward_pre_hooks) for module in plain.modules()]
    refused = pytest.raises(UsageError, match=r"has registered hooks on it for this call.*num_microbatch=1")
    with wrap_model_to_roundpipe(with_activated_adapter(), devices=["cpu"] * 2) as model, refused:
        model(**with_invocations(4))
    options = {"devices": ["cpu"] * 2, "model_run_config": microbatches(1)}
    with wrap_model_to_roundpipe(with_activated_adapter(), **options) as model:
        for num_rows in (4, 6):
            expected = whole_batch(plain, with_invocations(num_rows))
            model.zero_grad()
            loss = model(**with_invocations(num_rows)).loss
            loss.backward()
            assert_same(loss.detach(), expected.detach())
            model.synchronize()
            assert_close_grads(model, plain, 1e-6)
    assert hooks == [len(module._forward_pre_hooks) for module in model.model.modules()], "hooks were left behind"


def test_frozen_weights_in_bfloat16_stay_so_under_float32_adapters() -> None:
    base = small("llama").to(torch.bfloat16)
    plain = adapted("llama", base)
    assert {param.dtype for name, param in plain.named_parameters() if is_adapter(name)} == {torch.float32}
    batch = labelled("llama")
    with wrapped(copy.deepcopy(plain), 3, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as model:
        assert_same(model.forward_backward(input_kwargs=batch), plain_loss(plain, batch), "loss")
        model.synchronize()
        assert_same_grads(model.original_model, plain)
        assert_frozen_weights_cost_nothing(model)
