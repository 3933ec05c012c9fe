"""Tiny Hugging Face models, read from data/tiny_models.json.gz: what the model tests split, train and compare.

Used by the tests of this folder. Knows how a case is written down, and nothing of RoundPipe. A case is one model class
with a configuration of a few narrow layers and two labelled batches of different shapes. Weights and batches are
functions of the seeds in the file, so every build of a case is the same model, bit for bit.

    model, batch, other = case_named("llama:LlamaForCausalLM").build()
    model(**batch).loss.backward()
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

CASES_PATH = Path(__file__).parent / "data" / "tiny_models.json.gz"

# Read when transformers is first imported, which _class_named does: nothing is fetched, and advice on the
# odd configurations stays out of the test report.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

Batch = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One model class, how to build it, and the result of a prototype of the splitter; prints as its key."""

    key: str  # "llama:LlamaForCausalLM"; "+router" at the end: with the router loss
    class_name: str  # in transformers, like config_class
    config_class: str
    config: dict[str, Any]  # only what differs from the defaults of config_class
    inputs: dict[str, Any]  # argument name -> description, see decode
    inputs_other_shape: dict[str, Any]
    train_mode: bool
    seed: int  # of the weights
    model_type: str
    mapping: str  # the first auto-mapping with this class: "CAUSAL_LM", "MASKED_LM", ...; "NONE"
    mappings: list[list[str]]  # every [auto-mapping, model type] with this class
    requires: list[str]  # packages besides transformers
    tags: list[str]  # what splitting it takes: "plain", "tied", "mid_glue", ...
    outcome: str  # of the prototype: "bitwise", "exact" (but for rounding), "refused" or "crash"
    reason: str | None  # for the outcome, where it needs one

    def __str__(self) -> str:
        return self.key

    def build(self) -> tuple[nn.Module, Batch, Batch]:
        """Build the model in train mode without dropout, its batch, and a batch of another shape."""
        return self.build_model(), decode_batch(self.inputs), decode_batch(self.inputs_other_shape)

    def build_model(self) -> nn.Module:
        seed_everything(self.seed)
        model: nn.Module = _class_named(self.class_name)(config_of(self))
        turn_dropout_off(model)
        return model.train(self.train_mode)


def load_cases() -> list[Case]:
    """Every case, in the order of the file."""
    return list(_cases_by_key().values())


def case_named(key: str) -> Case:
    return _cases_by_key()[key]


def config_of(case: Case) -> Any:
    # from_dict may keep and change what it is given; the case outlives the model.
    return _class_named(case.config_class).from_dict(copy.deepcopy(case.config))


def decode_batch(described: dict[str, Any]) -> Batch:
    return {name: decode(value) for name, value in described.items()}


def decode(described: Any) -> Any:
    """The value of a description: a plain value, a container, or a tensor by its values, its fill or its seed."""
    match described:
        case {"list": items}:
            return [decode(item) for item in items]
        case {"tuple": items}:
            return tuple(decode(item) for item in items)
        case {"dict": items}:
            return decode_batch(items)
        case {"randn": shape, "seed": seed, "dtype": dtype}:
            return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
        case {"full": fill, "shape": shape, "dtype": dtype}:
            return torch.full(shape, fill, dtype=getattr(torch, dtype))
        case {"values": values, "shape": shape, "dtype": dtype}:
            return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)
        case dict():
            raise ValueError(f"no value is described by the keys {sorted(described)}; {CASES_PATH} is not of format 1")
        case _:
            return described


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch: initialisations draw from all three."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def turn_dropout_off(model: nn.Module) -> None:
    """Also where a probability is a plain attribute: stochastic depth, layer drop, functional dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("layerdrop", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@functools.cache
def _cases_by_key() -> dict[str, Case]:
    with gzip.open(CASES_PATH, "rt", encoding="utf-8") as file:
        return {fields["key"]: Case(class_name=fields.pop("class"), **fields) for fields in json.load(file)["cases"]}


def _class_named(name: str) -> Any:
    """Imports transformers only here: collecting the tests takes the keys, not the models."""
    import transformers

    return getattr(transformers, name)
