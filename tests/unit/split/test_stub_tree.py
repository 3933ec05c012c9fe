"""A stub tree looks like the model to the model's own code: blocks and taps are stubs, missing parameters are NaN."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelChangedError, ModelSplitError
from roundpipe.split.stubs import Ghosts, Stub, StubTree, directed_by, make_stub, unstubbed

WIDTH = 3
CPU = torch.device("cpu")
X = torch.arange(6.0).view(2, WIDTH)


class Block(nn.Module):
    kind = "attention"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.number = 7

    @property
    def doubled(self) -> int:
        return self.number * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * self.scale + self.shift
        for block in self.blocks:
            h = block(h)
        return self.head(h) * self.factor


class Director:
    """Runs modules that the tree includes, returns the argument for others, and notes every call."""

    device = CPU

    def __init__(self) -> None:
        self.seen: list[str] = []

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append(path)
        real = stub._modules.get("real")
        return args[0] if real is None else real(*args, **kwargs)

    def loss(self, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError


STUBS = frozenset({"embed", "blocks.0", "blocks.1", "head"})


def tree_of(model: nn.Module, owned: list[nn.Parameter], real: tuple[str, ...] = (), stubs: Any = STUBS) -> StubTree:
    reals = {id(model.get_submodule(path)) for path in real}
    ids = {id(param) for param in owned}
    tree = StubTree(model, stubs, lambda module: id(module) in reals, ids, Ghosts(model))
    tree.fill_in(CPU)
    return tree


def test_a_tree_that_includes_everything_computes_the_same_as_the_model() -> None:
    model = Model()
    tree = tree_of(model, list(model.parameters()), ("embed", "blocks.0", "blocks.1", "head"))
    director = Director()
    with directed_by(director):
        assert torch.equal(tree.root(X), model(X))
    assert director.seen == ["embed", "blocks.0", "blocks.1", "head"]
    assert {id(param) for param in tree.parameters() if param.numel()} == {id(param) for param in model.parameters()}


def test_only_owned_parameters_are_in_the_tree_and_others_are_nan_where_they_are_read() -> None:
    model = Model()
    tree = tree_of(model, [model.head.weight, model.head.bias], ("head",))
    assert {id(param) for param in tree.parameters() if param.numel()} == {id(model.head.weight), id(model.head.bias)}
    assert tree.needs == {"head.weight", "head.bias"}
    with directed_by(Director()):
        assert bool(tree.root.scale.isnan().all())
        assert tree.root.scale.shape == model.scale.shape
        assert bool(tree.root(X).isnan().all())
    owning = tree_of(model, [model.scale])
    with directed_by(Director()):
        assert torch.equal(owning.root(X), (X * model.scale + model.shift) * 2.0)


def test_a_stub_is_an_instance_of_its_modules_class_and_has_its_attributes() -> None:
    model = Model()
    root = tree_of(model, []).root
    with directed_by(Director()):
        stub: Any = root.blocks[0]
        assert isinstance(stub, Block)
        assert isinstance(stub, Stub)
        assert type(stub).__name__ == "Block"
        assert (stub.kind, stub.number, stub.doubled) == ("attention", 7, 14)
        assert stub.linear.in_features == WIDTH
        assert bool(stub.linear.weight.isfinite().all()), "a module inside it can be asked for its weight"
        assert torch.equal(stub.table, model.blocks[0].table)
        assert root.embed.weight.shape == model.embed.weight.shape
        assert bool(root.embed.weight.isnan().all())
        with pytest.raises(AttributeError):
            stub.never_there


def test_stubs_have_an_empty_parameter_of_the_modules_dtype() -> None:
    model = Model().to(torch.bfloat16)
    root = tree_of(model, []).root
    assert next(root.parameters()).dtype is torch.bfloat16
    for block in root.blocks:
        assert {param.dtype for param in block.parameters()} == {torch.bfloat16}
        assert sum(param.numel() for param in block.parameters()) == 0
        assert not any(param.requires_grad for param in block.parameters())


def test_a_model_of_two_dtypes_has_a_ghost_of_each() -> None:
    model = Model()
    model.blocks[1].half()
    root = tree_of(model, []).root
    assert [next(block.parameters()).dtype for block in root.blocks] == [torch.float32, torch.float16]
    assert len(Ghosts(model).all()) == 2
    assert Ghosts(model).of(nn.Tanh()) is None


def test_a_direct_call_of_forward_reaches_the_director() -> None:
    root = tree_of(Model(), []).root
    director = Director()
    with directed_by(director):
        assert root.blocks[1].forward(X) is X
    assert director.seen == ["blocks.1"]


def test_a_module_under_two_names_is_one_stub() -> None:
    model = Model()
    model.first = model.blocks[0]
    root = tree_of(model, []).root
    assert root.first is root.blocks[0]


def test_containers_are_copied_and_hold_the_stubs() -> None:
    model = Model()
    root = tree_of(model, []).root
    assert type(root.blocks) is nn.ModuleList
    assert root.blocks is not model.blocks
    assert len(root.blocks) == 2
    assert all(isinstance(block, Stub) for block in root.blocks)
    assert not any(isinstance(module, Stub) for module in model.modules())


def test_buffers_above_the_stubs_are_the_models_own() -> None:
    model = Model()
    assert tree_of(model, []).root.shift is model.shift


def test_a_stub_passed_as_an_argument_becomes_the_module() -> None:
    block = Block()
    assert unstubbed(make_stub(block, "b", block, None)) is block
    without = make_stub(block, "b", None, None)
    assert unstubbed(without) is without
    assert unstubbed(3) == 3


def test_each_thread_has_its_own_director() -> None:
    root = tree_of(Model(), []).root
    directors = [Director() for _ in range(4)]
    barrier = threading.Barrier(4)

    def run(director: Director) -> None:
        with directed_by(director):
            barrier.wait()
            for _ in range(len(directors) + directors.index(director)):
                root.blocks[0](X)

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, one)) for one in directors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(director.seen) for director in directors] == [4, 5, 6, 7]


def test_a_stub_called_without_a_director_raises() -> None:
    root = tree_of(Model(), []).root
    with directed_by(Director()):
        pass
    with pytest.raises(ModelSplitError, match=r"blocks\.0 is called when the model's forward has returned"):
        root.blocks[0](X)


# Changes of the model after the tree was made.


def test_refresh_copies_changed_and_new_attributes() -> None:
    model: Any = Model()
    tree = tree_of(model, list(model.parameters()))
    model.factor, model.extra = 5.0, "new"
    model.eval()
    tree.refresh()
    assert (tree.root.factor, tree.root.extra) == (5.0, "new")
    assert not tree.root.training
    with directed_by(Director()):
        assert torch.equal(tree.root(X), (X * model.scale + model.shift) * 5.0)


def test_refresh_keeps_attributes_that_a_run_of_the_tree_set() -> None:
    model: Any = Model()
    tree = tree_of(model, [])
    tree.root.factor = 9.0
    tree.refresh()
    assert tree.root.factor == 9.0
    assert model.factor == 2.0


CHANGES = {
    "replaced module": lambda model: setattr(model, "head", nn.Linear(WIDTH, WIDTH)),
    "replaced block": lambda model: model.blocks.__setitem__(0, Block()),
    "added block": lambda model: model.blocks.append(Block()),
    "removed module": lambda model: delattr(model, "head"),
    "replaced parameter": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(WIDTH))),
    "added parameter": lambda model: setattr(model, "more", nn.Parameter(torch.ones(WIDTH))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refresh_refuses_changed_modules_and_parameters(change: str) -> None:
    model = Model()
    tree = tree_of(model, [])
    tree.refresh()
    CHANGES[change](model)
    with pytest.raises(ModelChangedError, match="was added, replaced or removed after wrapping"):
        tree.refresh()


def test_a_forward_replaced_above_the_stubs_calls_the_stubs() -> None:
    model = Model()
    old = model.forward
    model.forward = lambda x: old(x) * 2
    tree = tree_of(model, list(model.parameters()), ("embed", "blocks.0", "blocks.1", "head"))
    director = Director()
    with directed_by(director):
        tree.root(X)
    assert director.seen == ["embed", "blocks.0", "blocks.1", "head"]


def test_a_forward_set_to_the_modules_own_method_is_followed() -> None:
    model = Model()
    model.forward = model.forward
    tree = tree_of(model, list(model.parameters()), ("embed", "blocks.0", "blocks.1", "head"))
    director = Director()
    with directed_by(director):
        tree.root(X)
    assert director.seen == ["embed", "blocks.0", "blocks.1", "head"]
