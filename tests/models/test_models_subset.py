"""A few tiny cases, with every peculiarity that splitting meets, train as the plain model does.

test_all_models does the same with all of them, and takes minutes.
"""

from __future__ import annotations

import pytest
from sweep import RUNS, check_case, demanded_outcome
from tiny_cases import case_named, load_cases

pytest.importorskip("transformers")

SUBSET = {
    # [prologue, layers, epilogue]
    "llama:LlamaForCausalLM": "no more than that",
    "gemma3:Gemma3ForCausalLM": "two masks and two rotary embeddings, for two kinds of layers",
    "gpt2:GPT2LMHeadModel": "embeddings by position",
    "bloom:BloomForCausalLM": "ALiBi",
    "mamba:MambaForCausalLM": "a state instead of attention",
    "bert:BertForMaskedLM": "a head tied to the embedding",
    "vit:ViTForImageClassification": "images",
    "swin:SwinForImageClassification": "blocks in stages",
    "resnet:ResNetForImageClassification": "BatchNorm",
    "zamba:ZambaForCausalLM": "one module inside several layers",
    # Code between the layers.
    "t5:T5ForConditionalGeneration": "encoder and decoder; the first layer hands its bias to the others",
    "llava:LlavaForConditionalGeneration": "the hidden states of the vision tower are caught by hooks",
    "qwen2_vl:Qwen2VLForConditionalGeneration": "patches of all images in one row",
    "qwen3_vl:Qwen3VLForConditionalGeneration": "features of several depths of the vision tower enter between layers",
    "deepseek_v2:DeepseekV2ForCausalLM": "the epilogue reads more than the last layer's output",
    "pp_formulanet:PPFormulaNetForConditionalGeneration": "a dependence that only autograd shows",
    "minicpmv4_6:MiniCPMV4_6ForConditionalGeneration": "other calls for another shape",
    "dpt:DPTForSemanticSegmentation": "a first run on made-up inputs fails when hooks are there already",
    "bigbird_pegasus:BigBirdPegasusForConditionalGeneration": "exchanges its attention when inputs are short",
    "reformer:ReformerModelWithLMHead": "layers called inside of an autograd function: the encoder is one layer",
    "hrm_text:HrmTextForCausalLM": "layers called in cycles, which start from a frozen parameter",
    # What layers leave behind.
    "mixtral:MixtralForCausalLM+router": "router logits are caught by hooks",
    "qwen3_next:Qwen3NextForCausalLM+router": "the same, with two kinds of layers",
    "gemma4:Gemma4ForCausalLM": "layers share keys and values in a dict",
    "xlm:XLMWithLMHeadModel": "a cache that is an argument, and changes in place",
    "ctrl:CTRLLMHeadModel": "embeddings scaled in place",
    # Refused.
    "hubert:HubertForCTC": "masks drawn in the forward",
    "pi0:PI0ForConditionalGeneration": "one tower reads the cache of another",
}


# On one device and in one microbatch `make test` runs two of them; `make test-models` runs every case both ways.
IN_ONE_MICROBATCH = ("llama:LlamaForCausalLM", "zamba:ZambaForCausalLM")


def subset_runs() -> list[object]:
    runs = [(key, *run) for key in SUBSET for run in RUNS]
    slow = [num_microbatch == 1 and key not in IN_ONE_MICROBATCH for key, _, num_microbatch in runs]
    return [
        pytest.param(*run, marks=pytest.mark.slow if is_slow else ()) for run, is_slow in zip(runs, slow, strict=True)
    ]


@pytest.mark.parametrize(("key", "num_devices", "num_microbatch"), subset_runs())
def test_trains_as_the_plain_model(key: str, num_devices: int, num_microbatch: int) -> None:
    case = case_named(key)
    verdict = check_case(case, num_devices, num_microbatch)
    demanded = demanded_outcome(case, num_microbatch)
    assert verdict.is_enough_for(demanded), f"{case} is to be {demanded}, or better: {verdict}"


def test_the_subset_has_every_tag() -> None:
    every_tag = {tag for case in load_cases() for tag in case.tags}
    assert every_tag == {tag for key in SUBSET for tag in case_named(key).tags}
