"""Specs: the classes are those of torch, and invalid specs are refused."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.distributed.pipelining import microbatch as torch_microbatch

from roundpipe.errors import ArgumentTypeError, ConfigError, MergeError, SplitError
from roundpipe.microbatch import Chunk, Reducer, Replicate, check_merge_output, check_split_input, check_split_label
from roundpipe.microbatch.specs import is_custom_function, is_leaf_spec, is_replicate

REDUCER = Reducer(torch.tensor(0.0), operator.add)


def test_spec_classes_are_those_of_torch() -> None:
    assert Chunk is torch_microbatch.TensorChunkSpec
    assert Replicate is torch_microbatch._Replicate
    assert Reducer is torch_microbatch._CustomReducer


@pytest.mark.parametrize("spec", [Replicate, Replicate()])
def test_replicate_is_a_spec_as_class_and_as_instance(spec) -> None:
    assert is_replicate(spec)
    assert is_leaf_spec(spec)
    assert not is_custom_function(spec)


@pytest.mark.parametrize("spec", [Chunk, Reducer, Chunk(0), REDUCER, None, (Chunk(0),)])
def test_specs_and_their_classes_do_not_count_as_functions(spec) -> None:
    assert not is_custom_function(spec)


@pytest.mark.parametrize("function", [lambda *_: None, print, torch.nn.Identity()])
def test_functions_and_callable_objects_count_as_functions(function) -> None:
    assert is_custom_function(function)
    check_split_input(function)
    check_split_label(function)
    check_merge_output(function)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        (None, None),
        ((Chunk(0), Replicate), None),
        [[Chunk(1), None], {"mask": {"a": Replicate()}}],
        (None, {"x": Chunk(-1)}),
    ],
)
def test_split_input_specs_are_accepted(spec) -> None:
    check_split_input(spec)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (3, ArgumentTypeError, "split_input must be None, a function .* not int 3"),
        (True, ArgumentTypeError, "not bool True"),
        (Chunk(0), ArgumentTypeError, "pair"),
        (Replicate, ArgumentTypeError, "pair"),
        ({"x": Chunk(0)}, ArgumentTypeError, "pair"),
        ((Chunk(0),), SplitError, "got 1 entries"),
        ((Chunk(0), None), SplitError, r"split_input\[0\] must be None or a tuple"),
        ((None, Replicate), SplitError, r"split_input\[1\] must be None or a dict"),
        ((None, (Chunk(0),)), SplitError, r"split_input\[1\] must be None or a dict"),
        (((Chunk(0), 0), None), ArgumentTypeError, r"split_input\[0\]\[1\] is int 0"),
        (((), {"mask": "cut"}), ArgumentTypeError, r"split_input\[1\]\['mask'\] is str 'cut'"),
        (((Chunk,), None), SplitError, r"split_input\[0\]\[0\] is the class TensorChunkSpec.*Chunk\(0\)"),
        (((REDUCER,), None), SplitError, r"split_input\[0\]\[0\] is a Reducer, which only merges"),
        (((Chunk("0"),), None), ArgumentTypeError, r"Chunk\('0'\); the dimension must be an int"),
        (((Chunk(True),), None), ArgumentTypeError, r"Chunk\(True\)"),
    ],
)
def test_wrong_split_input_is_refused(spec, error, message) -> None:
    with pytest.raises(error, match=message):
        check_split_input(spec)


@pytest.mark.parametrize("spec", [None, Chunk(0), Replicate, (Chunk(0), Replicate()), {"a": [None]}])
def test_label_and_merge_specs_are_accepted(spec) -> None:
    check_split_label(spec)
    check_merge_output(spec)


@pytest.mark.parametrize("value", [True, False, REDUCER, (REDUCER, None)])
def test_merge_output_accepts_bools_and_reducers(value) -> None:
    check_merge_output(value)


@pytest.mark.parametrize(
    ("spec", "error"), [(True, ArgumentTypeError), ("x", ArgumentTypeError), (REDUCER, SplitError)]
)
def test_wrong_split_label_is_refused(spec, error) -> None:
    with pytest.raises(error, match="split_label is"):
        check_split_label(spec)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (1, ArgumentTypeError, "merge_output is int 1"),
        ((Chunk(0), True), ArgumentTypeError, r"merge_output\[1\] is bool True"),
        (Reducer, MergeError, "merge_output is the class _CustomReducer"),
        (Chunk, MergeError, r"Chunk\(0\)"),
    ],
)
def test_wrong_merge_output_is_refused(spec, error, message) -> None:
    with pytest.raises(error, match=message):
        check_merge_output(spec)


def test_refusals_are_value_errors_or_type_errors() -> None:
    with pytest.raises(ValueError):
        check_split_input((Chunk(0), None))
    with pytest.raises(TypeError):
        check_merge_output(1.5)
    assert issubclass(SplitError, ConfigError)


def test_the_message_truncates_a_long_value() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        check_split_label("y" * 1000)
    assert len(str(caught.value)) < 300
