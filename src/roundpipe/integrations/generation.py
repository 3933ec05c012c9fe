"""Arguments of generate() that several places need: when an answer ends, greedy choice, prompts as tokens.

Knows models and tokenizers of transformers, nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def end_tokens(config: Any, tokenizer: Any) -> dict[str, Any]:
    """The tokens that end an answer, of the model's generation config and of the tokenizer, and that of padding."""
    of_model = config.eos_token_id
    ends = set([] if of_model is None else of_model if isinstance(of_model, list) else [of_model])
    ends |= set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if not ends:
        return {}
    padding = config.pad_token_id if config.pad_token_id is not None else min(ends)
    return {"eos_token_id": sorted(ends), "pad_token_id": padding}


def stopping_if(is_set: Callable[[], bool]) -> Any:
    """A criterion that ends all answers as soon as `is_set()`."""
    from transformers import StoppingCriteriaList

    def stops(tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(tokens),), is_set(), device=tokens.device)

    return StoppingCriteriaList([stops])


def tokens_of(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The tokens of a prompt: of a text as it is, of messages by the chat template."""
    if isinstance(prompt, str):
        made = tokenizer(prompt)
    else:
        made = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True)
    ids: list[int] = list(made["input_ids"])
    return ids
