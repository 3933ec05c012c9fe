"""Calls that one plan serves have equal signatures; calls that may need another plan have different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.split.plan import Detail, signature

IDS, LONG, FLOATS = torch.ones(2, 3, dtype=torch.long), torch.ones(5, 7, dtype=torch.long), torch.ones(2, 3)


def of(*args: Any, detail: Detail = Detail.FORMS, **kwargs: Any) -> Any:
    return signature(args, kwargs, True, detail)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another size": ({"x": IDS}, {"x": LONG}),
    "other values": ({"x": IDS}, {"x": IDS * 7}),
    "another order": ({"x": IDS, "y": FLOATS}, {"y": FLOATS, "x": IDS}),
    "nested": ({"x": {"a": IDS, "b": [FLOATS]}}, {"x": {"a": LONG, "b": [FLOATS]}}),
    "number of items in the batch": (
        {"x": IDS, "num_items_in_batch": 5},
        {"x": IDS, "num_items_in_batch": 6},
    ),
    "a parameter": ({"x": nn.Parameter(FLOATS)}, {"x": FLOATS}),
}
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one more": ({"x": IDS}, {"x": IDS, "y": IDS}),
    "None instead": ({"x": IDS}, {"x": None}),
    "given as None": ({"x": IDS}, {"x": IDS, "y": None}),
    "another name": ({"x": IDS}, {"y": IDS}),
    "another dtype": ({"x": IDS}, {"x": FLOATS}),
    "another dimension": ({"x": IDS}, {"x": IDS[None]}),
    "another bool": ({"x": IDS, "flag": True}, {"x": IDS, "flag": False}),
    "another string": ({"x": IDS, "mode": "a"}, {"x": IDS, "mode": "b"}),
    "another choice among layers": ({"x": IDS, "layer": -1}, {"x": IDS, "layer": -2}),
    "a longer list": ({"x": [IDS]}, {"x": [IDS, IDS]}),
    "another key": ({"x": {"a": IDS}}, {"x": {"b": IDS}}),
    "a tuple": ({"x": [IDS]}, {"x": (IDS,)}),
    "a bool and a number": ({"x": True}, {"x": 1}),
    "a number and a tensor": ({"x": 1}, {"x": torch.tensor(1)}),
    "an int and a float": ({"x": 1}, {"x": 1.0}),
    "a bool inside": ({"x": [True]}, {"x": [False]}),
}


@pytest.mark.parametrize("kind", SAME)
def test_calls_of_one_form_have_equal_signatures(kind: str) -> None:
    left, right = SAME[kind]
    assert of(**left) == of(**right)
    assert hash(of(**left)) == hash(of(**right))


@pytest.mark.parametrize("kind", OTHER)
def test_calls_of_different_forms_have_different_signatures(kind: str) -> None:
    left, right = OTHER[kind]
    assert of(**left) != of(**right)
    assert of(**left, detail=Detail.SIZES) != of(**right, detail=Detail.SIZES)


def test_positional_and_named_arguments_are_told_apart() -> None:
    assert of(IDS) != of(x=IDS)
    assert of(IDS) == of(LONG)
    assert of(IDS, FLOATS) != of(FLOATS, IDS)


def test_sizes_count_with_detail_sizes() -> None:
    assert of(x=IDS, detail=Detail.SIZES) != of(x=LONG, detail=Detail.SIZES)
    assert of(x=IDS, detail=Detail.SIZES) == of(x=IDS + 1, detail=Detail.SIZES)
    assert of(x=[IDS], detail=Detail.SIZES) != of(x=[LONG], detail=Detail.SIZES)


def test_values_of_small_integer_tensors_count_with_detail_values() -> None:
    assert of(x=IDS, detail=Detail.VALUES) == of(x=IDS.clone(), detail=Detail.VALUES)
    assert of(x=IDS, detail=Detail.VALUES) != of(x=IDS + 1, detail=Detail.VALUES)
    assert of(x=IDS, detail=Detail.VALUES) != of(x=LONG, detail=Detail.VALUES)
    assert of(x=FLOATS, detail=Detail.VALUES) == of(x=FLOATS + 1, detail=Detail.VALUES)
    large = torch.ones(9, 9, dtype=torch.long)
    assert of(x=large, detail=Detail.VALUES) == of(x=large + 1, detail=Detail.VALUES)


def test_grad_mode_and_training_mode_belong_to_the_form() -> None:
    with torch.no_grad():
        without = of(x=IDS)
    assert without != of(x=IDS)
    assert signature((), {"x": IDS}, False) != of(x=IDS)


def test_an_object_of_unknown_kind_counts_by_its_class() -> None:
    assert of(x=nn.Tanh()) == of(x=nn.Tanh())
    assert of(x=nn.Tanh()) != of(x=nn.ReLU())


def test_a_filled_cache_is_not_an_empty_one() -> None:
    transformers = pytest.importorskip("transformers")
    empty, filled = transformers.DynamicCache(), transformers.DynamicCache()
    filled.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    assert of(x=empty) != of(x=filled)
    assert of(x=empty) == of(x=transformers.DynamicCache())
