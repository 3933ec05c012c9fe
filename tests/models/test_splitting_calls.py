"""A call of a new form gets a split plan when it is made, and adds layers where needed.

Compared with the plain model as in test_splitting. Training over such a change is in test_rearranging.
"""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same
from helpers_split import (
    WIDTH,
    Block,
    Inputs,
    SplitModels,
    Toy,
    assert_same_training,
    check_split,
    own_loss,
    plain_call,
    rows,
    train_call,
)
from roundpipe import ModelSplitError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.split.splitter import ModelSplitter

BLOCK_NAMES = [f"blocks.{i}.{name}" for i in range(3) for name in dict(Block().named_parameters())]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def both_train(
    model: RoundPipe, reference: nn.Module, inputs: Inputs, num_microbatch: int = 2, shared: Any = ()
) -> None:
    expected = plain_call(reference, inputs, num_microbatch=num_microbatch)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    loss, outputs = train_call(model, inputs, config=config)
    assert_same(loss, expected.loss, "loss")
    assert_same(outputs, expected.outputs, "outputs")
    assert_same_training(model, reference, shared)


class PerImage(Toy):
    """The vision blocks run once for each image of a sample: as often as the images' second dimension says."""

    def __init__(self) -> None:
        super().__init__(2)
        self.vision = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        for i in range(0 if images is None else images.shape[1]):
            seen = images[:, i]
            for block in self.vision:
                seen = block(seen)
            h = h + seen
        for block in self.blocks:
            h = block(h)
        return self.head(h)


VISION = [f"vision.{i}.{name}" for i in range(2) for name in dict(Block().named_parameters())]


def with_images(num_images: int, seed: int = 5) -> Inputs:
    images = torch.randn(4, num_images, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": rows(4, seed=seed), "images": images}


def test_one_call_of_a_block_per_image_whatever_their_number(models: SplitModels, num_devices: int) -> None:
    """More images than in the plan, fewer, and the first number again; no layers are added if there are enough."""
    module = seeded(PerImage)
    reference = copy.deepcopy(module)
    model = models.wrap(module, with_images(1), num_devices)
    assert model.num_layers == 1 + 2 + 1 + 2 + 1
    sizes = []
    for round_, num_images in enumerate((1, 3, 2, 1, 3, 4, 2)):
        model.zero_grad()
        reference.zero_grad()
        both_train(model, reference, with_images(num_images, seed=round_), shared=VISION)
        sizes.append(model.num_layers)
    assert sizes == sorted(sizes)
    assert sizes[1] > sizes[0]
    assert sizes[4] == sizes[3] == sizes[2] == sizes[1]
    assert sizes[6] == sizes[5] > sizes[4]


def test_after_one_change_of_the_sequence_later_ones_keep_summed_gradients(models: SplitModels) -> None:
    """The first such call fails and drops summed gradients; the splitter then expects such changes."""
    module = seeded(PerImage)
    reference = copy.deepcopy(module)
    model = models.wrap(module, with_images(1), 2)
    train_call(model, with_images(1))
    with pytest.raises(ModelSplitError) as raised:
        train_call(model, with_images(2))
    assert "gathered" in "".join(raised.value.__notes__)
    for num_images in (2, 1, 3, 4, 2):
        both_train(model, reference, with_images(num_images, seed=num_images), shared=VISION)


def test_microbatches_of_one_call_may_follow_different_plans(models: SplitModels) -> None:
    module = seeded(PerImage)
    reference = copy.deepcopy(module)
    model = models.wrap(module, with_images(1), 3)
    pieces = [with_images(count, seed=count) for count in (2, 1, 3)]
    config = RoundPipeRunConfig(num_microbatch=3, split_input=lambda args, kwargs, count: ([()] * 3, pieces))
    loss = model.forward_backward((), {"x": rows(4)}, None, own_loss, run_config=config)
    expected = [own_loss(reference(**piece), None) for piece in pieces]
    for one in expected:
        one.backward()
    assert_same(loss, (expected[0] + expected[1] + expected[2]).detach())
    assert_same_training(model, reference, VISION)


class Headless(nn.Module):
    """Runs its blocks once for each column of an input, optionally with a product after each round."""

    has_glue = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        h = x
        for i in range(steps.shape[1]):
            for block in self.blocks:
                h = block(h)
            if self.has_glue:
                h = h * steps[:, i : i + 1]
        return h


class HeadlessWithGlue(Headless):
    has_glue = True


@pytest.mark.parametrize("build", [Headless, HeadlessWithGlue])
def test_a_model_that_is_nothing_but_blocks_may_call_them_more_or_less_often(
    models: SplitModels, build: Callable[[], nn.Module]
) -> None:
    module = seeded(build)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4), "steps": rows(4, width=2)}, 2)
    for num_steps in (2, 3, 1, 2):
        model.zero_grad()
        reference.zero_grad()
        inputs = {"x": rows(4, seed=num_steps), "steps": rows(4, width=num_steps)}
        both_train(model, reference, inputs, shared=BLOCK_NAMES)


def test_fewer_calls_than_planned_for_are_noticed(models: SplitModels) -> None:
    module = seeded(Headless)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4), "steps": rows(4, width=2)}, 2)
    both_train(model, reference, {"x": rows(4), "steps": rows(4, width=1)}, shared=BLOCK_NAMES)


class Reversing(Headless):
    """The same number of calls in another order."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for block in self.blocks if steps.shape[1] == 1 else reversed(self.blocks):
            x = block(x)
        return x


def test_the_same_blocks_in_another_order(models: SplitModels) -> None:
    module = seeded(Reversing)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4), "steps": rows(4, width=1)}, 2)
    for num_steps in (2, 1, 2):
        both_train(model, reference, {"x": rows(4), "steps": rows(4, width=num_steps)})


class Recurrent(Toy):
    """The number of rounds through its blocks is the largest value of an input, so shapes do not show it."""

    def forward(self, x: Tensor, rounds: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(int(rounds.max())):
            for block in self.blocks:
                h = block(h)
        return self.head(h)


def test_a_sequence_that_depends_on_values_may_change_back_and_forth(models: SplitModels) -> None:
    module = seeded(Recurrent)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4), "rounds": torch.full((4,), 1)}, 2)
    for num_rounds in (1, 2, 2, 1, 3, 1):
        inputs = {"x": rows(4, seed=num_rounds), "rounds": torch.full((4,), num_rounds)}
        model.zero_grad()
        reference.zero_grad()
        both_train(model, reference, inputs, shared=BLOCK_NAMES)


# Optional inputs.


class Optional(Toy):
    """With a hint the blocks get a bias, and the result is scaled by another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hint_scale = nn.Parameter(torch.rand(WIDTH))
        self.hint_embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hint: Tensor | None = None, target: Tensor | None = None) -> Any:
        h = self.embed(x)
        bias = None if hint is None else self.hint_embed(hint)
        for block in self.blocks:
            h = block(h, bias)
        logits = self.head(h) if hint is None else self.head(h) * self.hint_scale
        return logits if target is None else {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


FORMS: dict[str, Callable[[int], Inputs]] = {
    "bare": lambda seed: {"x": rows(4, seed=seed)},
    "hint": lambda seed: {"x": rows(4, seed=seed), "hint": rows(4, seed=seed + 1)},
    "target": lambda seed: {"x": rows(4, seed=seed), "target": rows(4, seed=seed + 2)},
    "none": lambda seed: {"x": rows(4, seed=seed), "hint": None, "target": rows(4, seed=seed + 2)},
    "all": lambda seed: {"x": rows(4, seed=seed), "hint": rows(4, seed=seed + 1), "target": rows(4, seed=seed + 2)},
}


class FeatureLayer(Toy):
    """Which hidden state the head gets is an argument."""

    def forward(self, x: Tensor, layer: int = -1) -> Tensor:
        h, states = self.embed(x), []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        return self.head(states[layer])


def test_an_option_that_is_a_number_may_change(models: SplitModels) -> None:
    module = seeded(FeatureLayer)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4), "layer": -1}, 2)
    for layer in (-1, 0, -2, -1):
        both_train(model, reference, {"x": rows(4, seed=layer + 9), "layer": layer})


class FeatureByValue(Toy):
    """Which hidden state the head gets is a value in a tensor."""

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        h, states = self.embed(x), []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        return self.head(states[int(which.max())])


def test_a_read_that_only_values_decide_gives_nan_and_no_plausible_number(models: SplitModels) -> None:
    """The form of a call does not show that another hidden state is read. Tensors that were dropped are NaN."""
    module = seeded(FeatureByValue)
    model = models.wrap(copy.deepcopy(module), {"x": rows(4), "which": torch.full((4,), 2)}, 2)
    for which in (2, 0, 1):
        inputs = {"x": rows(4, seed=which), "which": torch.full((4,), which)}
        expected, (loss, _) = plain_call(module, inputs).loss, train_call(model, inputs)
        assert torch.equal(loss, expected) or bool(loss.isnan())


@pytest.mark.parametrize("first", ["bare", "all"])
def test_inputs_may_come_and_go(models: SplitModels, first: str) -> None:
    module = seeded(Optional)
    reference = copy.deepcopy(module)
    model = models.wrap(module, FORMS[first](0), 2)
    for seed, form in enumerate([first, *FORMS, *reversed(FORMS)]):
        both_train(model, reference, FORMS[form](seed))


def test_several_examples_are_planned_for_at_once(models: SplitModels) -> None:
    module = seeded(Optional)
    reference = copy.deepcopy(module)
    model = models.wrap(module, [make(0) for make in FORMS.values()], 2)
    layers = tuple(model.model)
    for seed, form in enumerate(FORMS):
        both_train(model, reference, FORMS[form](seed))
    assert tuple(model.model) == layers


def test_a_call_of_a_new_form_that_cannot_be_split_says_what_to_do(models: SplitModels) -> None:
    class Fickle(Toy):
        def forward(self, x: Tensor, hint: Tensor | None = None) -> Tensor:
            if hint is not None:
                return self.head(self.embed(x))
            return super().forward(x)

    module = seeded(Fickle)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    with pytest.raises(ModelSplitError, match="no repeated list") as raised:
        train_call(model, {"x": rows(), "hint": rows()})
    assert "use_sequential_preset=False" in "".join(raised.value.__notes__)
    both_train(model, reference, {"x": rows()})


def test_another_batch_size_and_length_need_no_new_plan(models: SplitModels, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sequences(Toy):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).mean(1)
            for block in self.blocks:
                h = block(h) * x.shape[1]
            return self.head(h)

    module = seeded(Sequences)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": torch.randn(2, 3, WIDTH)}, 2)
    monkeypatch.setattr(ModelSplitter, "learn", lambda *args: pytest.fail("a plan was made"))
    for shape in ((2, 3), (4, 5), (7, 1), (2, 9)):
        both_train(model, reference, {"x": torch.randn(*shape, WIDTH)})


def test_first_call_may_be_in_inference_mode(models: SplitModels) -> None:
    """The model is then split by trials that need gradients and version counters."""
    module = seeded(Toy)
    reference = copy.deepcopy(module)
    model = models.keep(wrap_model_to_roundpipe(module, example_inputs={"x": rows()}, devices=["cpu"] * 2))
    with torch.inference_mode():
        inputs: Inputs = {"x": rows().unsqueeze(1)}  # of another form than the example
        torch.testing.assert_close(model(**inputs), reference(**inputs))
    assert isinstance(model, RoundPipe)
    both_train(model, reference, {"x": rows()})


def test_calls_without_grad_between_calls_with_grad(models: SplitModels) -> None:
    module = seeded(Optional)
    reference = copy.deepcopy(module)
    model = models.wrap(module, FORMS["bare"](0), 3)
    for form in ("bare", "hint"):
        both_train(model, reference, FORMS[form](1))
        with torch.no_grad():
            output = model(**FORMS[form](2), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
            assert_same(output, reference(**FORMS[form](2)))


# Exceptions of the model.


class Raising(Toy):
    fails_in: str | None = None

    class Block(Block):
        fails = False

        def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
            if self.fails:
                raise ZeroDivisionError("in a block")
            return super().forward(h, bias)

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in == "prologue":
            raise ZeroDivisionError("in the prologue")
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        if self.fails_in == "epilogue":
            raise ZeroDivisionError("in the epilogue")
        return self.head(h)


@pytest.mark.parametrize("place", ["prologue", "block", "epilogue"])
def test_an_exception_of_the_model_reaches_the_caller_unchanged(models: SplitModels, place: str) -> None:
    module: Any = seeded(Raising)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows(4)}, 2)
    both_train(model, reference, {"x": rows(4)})
    module.fails_in, module.blocks[1].fails = place, place == "block"
    with pytest.raises(ZeroDivisionError, match=place):
        train_call(model, {"x": rows(4)})
    module.fails_in, module.blocks[1].fails = None, False
    reference.zero_grad()  # a failed call drops what was gathered
    both_train(model, reference, {"x": rows(4)})


# Threads.


def test_eight_threads_run_the_layers_of_one_plan_without_affecting_each_other() -> None:
    module = seeded(Optional)
    splitter = ModelSplitter(module)
    for form in ("bare", "hint"):
        splitter.learn((), FORMS[form](0))
    batches = [FORMS["hint" if number % 2 else "bare"](number) for number in range(8)]
    expected = [module(**batch).detach() for batch in batches]
    found: list[list[Tensor]] = [[] for _ in batches]
    start = threading.Barrier(len(batches))

    def run(number: int) -> None:
        start.wait()
        for _ in range(5):
            value: Any = splitter.layers[0](**batches[number])
            for layer in splitter.layers[1:]:
                value = layer(value)
            found[number].append(value.detach())

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, n)) for n in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, outputs in enumerate(found):
        assert len(outputs) == 5
        for output in outputs:
            assert_same(output, expected[number], f"thread {number}")


def test_two_models_of_one_class_do_not_affect_each_other(models: SplitModels) -> None:
    first = check_split(models, seeded(Toy), {"x": rows()}, 2)
    second = check_split(models, Toy(), {"x": rows(seed=6)}, 2)
    with torch.no_grad():
        assert not torch.equal(first(x=rows()), second(x=rows()))
    assert own_loss(first(x=rows()), None).requires_grad


def test_argument_given_twice_is_refused() -> None:
    with (
        wrap_model_to_roundpipe(Toy(), example_inputs={"x": rows()}, devices=["cpu"]) as model,
        pytest.raises(TypeError, match=r"Toy\.forward\(\) got multiple values for argument 'x'"),
    ):
        model(rows(), x=rows())
