"""Inputs and labels that cannot be split into microbatches, and outputs that cannot be merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import BATCH, NUM_MICROBATCH, Scene, notes_of, raising, refused
from torch import nn

from helpers_tiny_hf import tiny_model
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ArgumentTypeError, ConfigError, MergeError, SplitError, UsageError
from roundpipe.microbatch import Chunk, Reducer, Replicate


class Returns(nn.Module):
    """Returns `make(input)`, which differs in structure between microbatches."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x * self.weight)


# ---- the arguments of a call -----------------------------------------------------------------------------------------


def test_input_args_that_are_no_tuple(scene: Scene) -> None:
    for args in (scene.x, {"x": scene.x}, None, "x"):
        with refused(
            ArgumentTypeError, "input_args must be a tuple", "(x,)", type(args).__name__, "input_kwargs=batch"
        ):
            scene.forward_backward(input_args=args)


def test_a_run_config_under_another_name() -> None:
    """Models of transformers take any keyword, and would ignore it."""
    ids = torch.randint(64, (6, 5))
    config: Any = RoundPipeRunConfig(num_microbatch=1)
    with (
        wrap_model_to_roundpipe(tiny_model(), devices=["cpu"]) as model,
        pytest.raises(ArgumentTypeError, match=r"run_config.*roundpipe_run_config="),
    ):
        model(input_ids=ids, run_config=config)


def test_input_kwargs_that_are_no_dict(scene: Scene) -> None:
    for kwargs in ([("x", 1)], None, scene.x):
        with refused(ArgumentTypeError, "input_kwargs must be a dict", type(kwargs).__name__):
            scene.forward_backward(input_kwargs=kwargs)


def test_input_kwargs_whose_keys_are_no_strings(scene: Scene) -> None:
    with refused(ArgumentTypeError, "input_kwargs", "keys must be strings", "3"):
        scene.forward_backward(input_kwargs={3: scene.x})


def test_no_input_at_all(scene: Scene) -> None:
    with pytest.raises(TypeError, match="input") as caught:
        scene.forward_backward(input_args=())
    assert "layer 0" in notes_of(caught.value)


def test_an_input_the_first_layer_does_not_take(scene: Scene) -> None:
    with pytest.raises(TypeError, match="mask") as caught:
        scene.model(scene.x, mask=scene.x)
    assert "layer 0" in notes_of(caught.value)


def test_an_input_of_the_wrong_shape(scene: Scene) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        scene.forward_backward(input_args=(torch.ones(BATCH, 7),))
    assert "layer 0, microbatch 0" in notes_of(caught.value)


def test_inputs_of_different_batch_size(scene: Scene) -> None:
    with refused(SplitError, "args[0]", "(6, 4)", "kwargs['extra']", "(5, 4)", "split_input", "Replicate"):
        scene.forward_backward(input_kwargs={"extra": torch.ones(5, 4)})


def test_a_label_of_the_wrong_length(scene: Scene) -> None:
    with refused(SplitError, "args[0]", "(6, 4)", "label", "(5, 2)", "split_label"):
        scene.forward_backward(label=scene.y[:5])


@pytest.mark.parametrize("num_microbatch", [1, NUM_MICROBATCH])
def test_a_label_of_the_wrong_length_for_a_model_split_at_its_blocks(num_microbatch: int) -> None:
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    ids = torch.zeros(6, 4, dtype=torch.long)
    with wrap_model_to_roundpipe(tiny_model(), devices=["cpu"] * 2, model_run_config=config) as model:
        for label in (torch.zeros(5), {"classes": torch.zeros(12, 2)}):
            with refused(SplitError, "kwargs['input_ids']", "(6, 4)", "label", "split_label", "Replicate"):
                model.forward_backward(
                    input_kwargs={"input_ids": ids}, label=label, loss_fn=raising(AssertionError("the loss runs"))
                )


def test_an_empty_batch(scene: Scene) -> None:
    with refused(SplitError, "nothing to split", "(0, 4)", "Skip empty batches"):
        scene.forward_backward(input_args=(scene.x[:0],), label=scene.y[:0])
    with refused(SplitError, "nothing to split", "(0, 4)"):
        scene.model(scene.x[:0])


def test_a_label_that_requires_grad(scene: Scene) -> None:
    with refused(UsageError, "label", "requires grad", "(2, 2)", "detach()"):
        scene.forward_backward(label=scene.y.clone().requires_grad_())


UNMOVABLE: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda tensor: tensor.to("meta"), "meta"),
    (lambda tensor: tensor.to_sparse(), "torch.sparse_coo"),
    (lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged), "nested"),
]


def test_tensors_that_cannot_travel(scene: Scene) -> None:
    for make, kind in UNMOVABLE:
        with refused(UsageError, "a tensor", kind, "cannot travel", "dense tensors with values"):
            scene.forward_backward(input_args=(make(scene.x),))
        with refused(UsageError, "a tensor", kind, "cannot travel"):
            scene.forward_backward(label={"deep": [make(scene.y)]})
        with refused(UsageError, "a tensor", kind, "cannot travel"):
            scene.model(scene.x, extra=make(scene.x))


def test_layers_that_return_what_cannot_travel(scene: Scene) -> None:
    for make, kind in UNMOVABLE[:2]:
        with RoundPipe(Returns(make), devices=["cpu"] * 2) as model:
            for with_grad in (False, True):
                with (
                    torch.set_grad_enabled(with_grad),
                    refused(UsageError, "a tensor", kind, "what layers return") as caught,
                ):
                    model(scene.x)
                assert "layer 0, microbatch 0" in notes_of(caught.value)


def test_a_return_flag_that_is_no_bool(scene: Scene) -> None:
    for flag in ("no", 1, None):
        with refused(ArgumentTypeError, "return_outputs must be True or False", repr(flag)):
            scene.forward_backward(return_outputs=flag)


# ---- specs and functions that split ----------------------------------------------------------------------------------


FAULTY_SPECS: list[tuple[Any, type[ConfigError] | type[ArgumentTypeError], list[str]]] = [
    (((Chunk(0), Chunk(0)), None), SplitError, ["spec for args does not match", "(Tensor[6, 4],)"]),
    (((Chunk(0),), {"mask": Chunk(0)}), SplitError, ["spec for kwargs does not match", "mask"]),
    (((Chunk(2),), None), SplitError, ["Chunk(2)", "args[0]", "(6, 4)", "2 dimension(s)"]),
    (((Chunk(-3),), None), SplitError, ["Chunk(-3)", "args[0]", "(6, 4)"]),
    (((Chunk,), None), SplitError, ["split_input[0][0]", "the class", "Chunk(0)"]),
    (((Chunk("0"),), None), ArgumentTypeError, ["Chunk('0')", "must be an int"]),
    (((0,), None), ArgumentTypeError, ["split_input[0][0]", "int 0", "Chunk(dim)"]),
    (((Reducer(0, max),), None), SplitError, ["Reducer", "only merges", "Chunk(dim)"]),
    ((Chunk(0), None), SplitError, ["split_input[0]", "((Chunk(0),), None)"]),
    (((Chunk(0),),), SplitError, ["pair (args_spec, kwargs_spec)", "1 entries"]),
    (((Chunk(0),), [Chunk(0)]), SplitError, ["split_input[1]", "dict"]),
    ("dim0", ArgumentTypeError, ["split_input", "str 'dim0'"]),
]


def test_an_input_spec_of_the_wrong_form(scene: Scene) -> None:
    for spec, kind, fragments in FAULTY_SPECS:
        with refused(kind, *fragments):
            scene.with_config(split_input=spec)


def test_a_label_spec_of_the_wrong_form(scene: Scene) -> None:
    with refused(SplitError, "spec for label does not match", "Tensor[6, 2]"):
        scene.with_config(split_label=(Chunk(0), Chunk(0)))
    with refused(SplitError, "Chunk(5)", "label", "(6, 2)"):
        scene.with_config(split_label=Chunk(5))
    with refused(ArgumentTypeError, "split_label", "1.5", "Chunk(dim)"):
        scene.with_config(split_label=1.5)


def in_parts(count: int) -> Callable[[Any, Any, int], Any]:
    return lambda args, kwargs, _: ([(part,) for part in args[0].tensor_split(count)], [kwargs] * count)


def test_split_functions_that_disagree(scene: Scene) -> None:
    with refused(SplitError, "disagree on the number of microbatches", "args: 2", "label: 3"):
        scene.with_config(split_input=in_parts(2), split_label=lambda label, _: list(label.tensor_split(3)))
    with refused(SplitError, "disagree on the number of microbatches", "args: 3", "kwargs: 2"):
        scene.with_config(split_input=lambda args, kwargs, _: ([args] * 3, [kwargs] * 2))


def test_a_split_function_that_wants_more_than_there_is(scene: Scene) -> None:
    with refused(SplitError, "7", "label", "(6, 2)"):
        scene.with_config(split_input=in_parts(7))


def test_a_split_function_that_returns_something_else(scene: Scene) -> None:
    for garbage in (None, 3, [scene.x, scene.x, scene.x], "ab"):
        with refused(SplitError, "split_input must return (args_list, kwargs_list)"):
            scene.with_config(split_input=lambda args, kwargs, count, garbage=garbage: garbage)
    with refused(SplitError, "args_list[0]", "Tensor[2, 4]", "(tensor,)"):
        scene.with_config(split_input=lambda args, kwargs, n: (list(args[0].tensor_split(n)), [kwargs] * n))
    with refused(SplitError, "kwargs_list[0]", "None", "{} for none"):
        scene.with_config(split_input=lambda args, kwargs, n: ([args] * n, [None] * n))
    with refused(SplitError, "no microbatch at all", "at least one"):
        scene.with_config(split_input=lambda args, kwargs, n: ([], []))
    with refused(SplitError, "split_label must return a list", "Tensor[6, 2]"):
        scene.with_config(split_label=lambda label, n: label)


def test_a_split_function_that_fails(scene: Scene) -> None:
    with refused(KeyError, "tokens") as caught:
        scene.with_config(split_input=raising(KeyError("tokens")))
    assert "split_input function" in notes_of(caught.value)
    with refused(KeyError, "targets") as caught:
        scene.with_config(split_label=raising(KeyError("targets")))
    assert "split_label function" in notes_of(caught.value)


# ---- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda x: int(x[0, 0]), ["output", "equal in all microbatches", "microbatch 1", "Reducer"]),
        (lambda x: (x,) if x[0, 0] == 0 else [x], ["different structures at output", "microbatch 1"]),
        (lambda x: {"a": x} if x[0, 0] == 0 else {"b": x}, ["different structures at output", "'a'", "'b'"]),
        (lambda x: (x, None) if x[0, 0] == 0 else (x, x), ["different structures at output[1]", "None"]),
        (lambda x: x[:, : int(x[0, 0]) + 1], ["output", "concatenated along dim 0", "(1, 1), (1, 2)", "Pad"]),
    ],
    ids=["unequal", "container", "keys", "leaf", "shape"],
)
def test_outputs_that_do_not_merge(make: Any, fragments: list[str], with_grad: bool) -> None:
    x = torch.arange(3.0).reshape(3, 1) * torch.ones(1, 4)
    with RoundPipe(Returns(make), devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model:
        with torch.set_grad_enabled(with_grad), refused(MergeError, *fragments):
            model(x)
        with torch.set_grad_enabled(with_grad):
            assert model(x[:1]) is not None


def test_merge_specs_of_the_wrong_form(scene: Scene) -> None:
    cases: list[tuple[Any, type[ConfigError] | type[ArgumentTypeError], list[str]]] = [
        ((Chunk(0), Chunk(0)), MergeError, ["merge spec for output does not match", "Tensor[2, 2]"]),
        (Chunk(3), MergeError, ["output", "along dim 3", "(2, 2)"]),
        (Reducer, MergeError, ["the class", "Reducer(init_value, fn)"]),
        (Replicate, MergeError, ["output", "equal in all microbatches"]),
        (3, ArgumentTypeError, ["merge_output", "int 3", "Chunk(dim)"]),
    ]
    for spec, kind, fragments in cases:
        with refused(kind, *fragments):
            scene.forward_backward(return_outputs=True, run_config=RoundPipeRunConfig(merge_output=spec))
        with refused(kind, *fragments):
            scene.model(scene.x, roundpipe_run_config=RoundPipeRunConfig(merge_output=spec))


def test_a_merge_function_that_fails(scene: Scene) -> None:
    config = RoundPipeRunConfig(merge_output=raising(ZeroDivisionError("merging")))
    for call in (
        lambda: scene.forward_backward(return_outputs=True, run_config=config),
        lambda: scene.model(scene.x, roundpipe_run_config=config),
    ):
        with refused(ZeroDivisionError, "merging") as caught:
            call()
        assert "merge_output function" in notes_of(caught.value)
    with torch.no_grad(), refused(ZeroDivisionError, "merging"):
        scene.model(scene.x, roundpipe_run_config=config)


def test_packed_data_with_another_number_of_microbatches(scene: Scene) -> None:
    unmerged = RoundPipeRunConfig(merge_output=False, num_microbatch=2)
    with torch.no_grad(), RoundPipe(nn.Linear(4, 4), devices=["cpu"], model_run_config=unmerged) as first:
        packed = first(scene.x)
        other = first(scene.x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH))
    with refused(SplitError, "args[0] has 2 microbatches", "kwargs['other'] has 3 microbatches", "num_microbatch"):
        scene.model(packed, other=other)
