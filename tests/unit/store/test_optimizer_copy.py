"""The optimizer's copy of a parameter is an nn.Parameter that takes no memory until its values are needed."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.optim.native.kernel import one_pass_kernel
from roundpipe.store import OptimizerCopy

WAIT_S = 30.0
SHAPE = (5, 8)


def weight(seed: int = 1) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def make(seed: int = 1) -> OptimizerCopy:
    return OptimizerCopy.of_weight(weight(seed), torch.float32)


def with_lower_bits(seed: int = 1) -> tuple[OptimizerCopy, Tensor]:
    """A copy as an optimizer leaves it, and its values."""
    made = make()
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    kernel = one_pass_kernel()
    assert kernel is not None, "the tests need a C compiler"
    assert made.halves is not None
    kernel.halve(value, made.halves)
    return made, value


def memory_of(made: OptimizerCopy) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return made.untyped_storage().nbytes()


class Source:
    """A gradient that has landed, for the thread that made this object or for `thread`."""

    def __init__(self, tensor: Tensor | None, thread: int | None = None) -> None:
        self.tensor, self.thread = tensor, thread or threading.get_ident()
        self.gets = self.releases = 0

    def is_usable(self) -> bool:
        return threading.get_ident() == self.thread

    def gradient_of(self, record: Any) -> Tensor | None:
        self.gets += 1
        return self.tensor

    def release(self, record: Any) -> None:
        self.releases += 1


def gradient(seed: int = 5) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# Behaving like a parameter.


def test_it_is_a_parameter() -> None:
    made = make()
    assert isinstance(made, nn.Parameter)
    assert isinstance(made, Tensor)
    assert (made.shape, made.dtype, made.device.type) == (SHAPE, torch.float32, "cpu")
    assert made.is_leaf
    assert made.requires_grad
    assert made.grad is None
    assert memory_of(made) == 0


def test_it_prints_its_values() -> None:
    made, value = with_lower_bits()
    text = repr(made)
    assert text.startswith("Parameter containing:")
    assert "requires_grad=True" in text
    assert f"{float(value[0, 0]):.4f}" in text


def test_it_goes_into_modules_and_optimizers() -> None:
    made, value = with_lower_bits()
    holder = nn.Module()
    holder.weight = made
    assert dict(holder.named_parameters()) == {"weight": made}
    optimizer = torch.optim.Adam([{"params": [made], "lr": 0.1}])
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert memory_of(made) == 0, "none of that needs values"
    plain = nn.Parameter(value.clone())
    made.grad, plain.grad = torch.ones(SHAPE), torch.ones(SHAPE)
    optimizer.step()
    torch.optim.Adam([plain], lr=0.1).step()
    assert torch.equal(made, plain)


ABOUT_SHAPE: dict[str, Callable[[OptimizerCopy], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0)),
    "numel": lambda p: (p.numel(), torch.numel(p)),
    "dim": lambda p: (p.dim(), p.ndim),
    "stride": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset()),
    "dtype": lambda p: (p.dtype, p.itemsize, p.nbytes, p.element_size()),
    "kind": lambda p: (p.device, p.layout, p.is_cuda, p.is_sparse, p.is_floating_point(), p.is_complex()),
    "floating": lambda p: torch.is_floating_point(p),
    "len": len,
    "hash": hash,
    "in a dict": lambda p: {p: 1}[p],
    "grad": lambda p: p.grad,
    "no grad": lambda p: setattr(p, "grad", None),
    "new grad": lambda p: setattr(p, "grad", torch.ones(SHAPE)),
    "requires_grad": lambda p: p.requires_grad,
    "freezing": lambda p: p.requires_grad_(False),
    "zeros_like": lambda p: torch.zeros_like(p, memory_format=torch.preserve_format),
    "empty_like": lambda p: torch.empty_like(p),
    "version": lambda p: p._version,
    "touches": lambda p: p.was_touched(),
}


@pytest.mark.parametrize("question", ABOUT_SHAPE)
def test_questions_about_shape_and_type_take_no_memory(question: str) -> None:
    made, _ = with_lower_bits()
    ABOUT_SHAPE[question](made)
    assert memory_of(made) == 0
    assert made.halves is not None


VALUES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum().detach(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone().detach(),
    "arithmetic": lambda p: (2 * p - 1).detach(),
    "reflected": lambda p: torch.sub(torch.ones(SHAPE), p).detach(),
    "in a list": lambda p: torch.stack([p, p]).detach(),
    "by keyword": lambda p: torch.add(input=torch.zeros(SHAPE), other=p).detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "item": lambda p: p[1, 2].item(),
    "tolist": lambda p: p.tolist(),
    "cast": lambda p: p.to(torch.float64).detach(),
    "view": lambda p: p.view(-1).detach().clone(),
    "iteration": lambda p: [row.detach() for row in p],
    "equality": lambda p: p == 0.0,
    "foreach": lambda p: [t.detach() for t in torch._foreach_mul([p], 3.0)],
    "linear": lambda p: nn.functional.linear(torch.ones(2, SHAPE[1]), p).detach(),
    "out": lambda p: torch.neg(p.detach(), out=torch.empty(SHAPE)),
    "gradient": lambda p: torch.autograd.grad((p * p).sum(), p)[0],
}


@pytest.mark.parametrize("operation", VALUES)
def test_values_are_right_and_take_memory(operation: str) -> None:
    made, value = with_lower_bits()
    seen = VALUES[operation](made)
    expected = VALUES[operation](nn.Parameter(value.clone()))
    assert str(seen) == str(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(seen, expected)
    assert memory_of(made) == value.nbytes
    assert made.halves is None


WRITES: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p.add_(1.0),
    "copy": lambda p: p.copy_(torch.arange(40.0).view(SHAPE)),
    "data": lambda p: p.data.mul_(2.0),
    "new data": lambda p: setattr(p, "data", torch.full(SHAPE, 7.0)),
    "item": lambda p: p.__setitem__((0, 1), 9.0),
    "init": lambda p: nn.init.constant_(p, 3.0),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "detached": lambda p: p.detach().zero_(),
}


@pytest.mark.parametrize("operation", WRITES)
def test_writes_reach_the_copy_and_are_noticed(operation: str) -> None:
    made, value = with_lower_bits()
    made.forget_touches()
    plain = nn.Parameter(value.clone())
    with torch.no_grad():
        WRITES[operation](made)
        WRITES[operation](plain)
    assert made.was_touched()
    assert torch.equal(made, plain)
    rounded = torch.empty(SHAPE, dtype=torch.bfloat16)
    made.write_weight(rounded)
    assert torch.equal(rounded, plain.detach().to(torch.bfloat16))


def saved_and_loaded(made: Any) -> Any:
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_copy_of_it_is_a_parameter_of_its_own(copied: Callable[[Any], Any]) -> None:
    made, value = with_lower_bits()
    made.requires_grad_(False)
    twin = copied(made)
    assert isinstance(twin, nn.Parameter)
    assert not twin.requires_grad
    assert torch.equal(twin, value)
    twin.fill_(3.0)
    assert torch.equal(made, value)
    again = copied(twin)
    assert torch.equal(again, twin)


def test_a_pickle_names_nothing_of_ours() -> None:
    assert type(pickle.loads(pickle.dumps(make()))) is nn.Parameter


# Which copies are halved.


@pytest.mark.parametrize(
    ("of", "to", "is_halved"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, False),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float64, False),
        (torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_only_float32_copies_of_bfloat16_weights_do_without_memory(
    of: torch.dtype, to: torch.dtype, is_halved: bool
) -> None:
    source = weight().to(of)
    made = OptimizerCopy.of_weight(source, to)
    assert (made.halves is not None) == is_halved
    assert (memory_of(made) == 0) == is_halved
    assert made.dtype is to
    assert torch.equal(made, source.to(to))
    if not is_halved:
        source.zero_()
        assert made.any(), "it has memory for values"


def test_a_copy_of_a_weight_with_gaps_has_memory() -> None:
    made = OptimizerCopy.of_weight(weight()[:, ::2], torch.float32)
    assert made.halves is None
    assert torch.equal(made, weight()[:, ::2].float())


def test_strides_are_the_weights() -> None:
    made = OptimizerCopy.of_weight(weight().t(), torch.float32)
    assert made.stride() == weight().t().stride()
    assert torch.equal(made, weight().t().float())
    assert made.stride() == weight().t().stride()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    made = OptimizerCopy.of_weight(torch.ones(shape, dtype=torch.bfloat16), torch.float32)
    assert torch.equal(made, torch.ones(shape))


# What the store does.


def test_the_weight_is_written_elsewhere_and_the_value_moves_with_it() -> None:
    made, value = with_lower_bits()
    assert made.halves is not None
    old, new = made.halves.weight, torch.empty(SHAPE, dtype=torch.bfloat16)
    made.write_weight(new)
    assert torch.equal(new, value.to(torch.bfloat16))
    assert made.halves.weight is new
    old.fill_(float("nan"))  # the memory may hold another version now
    assert memory_of(made) == 0
    assert torch.equal(made, value)


def test_memories_that_change_places_are_followed() -> None:
    made, value = with_lower_bits()
    assert made.halves is not None
    one, other = made.halves.weight, torch.zeros(SHAPE, dtype=torch.bfloat16)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    made.weights_swapped(one, other)
    assert made.halves.weight is other
    assert torch.equal(made, value)


@pytest.mark.parametrize("has_memory", [False, True])
def test_what_the_user_writes_into_the_weight_is_the_value(has_memory: bool) -> None:
    made, _ = with_lower_bits()
    if has_memory:
        made.take_memory()
    written = weight(9)
    made.follow_weight(written)
    assert (memory_of(made) == 0) == (not has_memory)
    assert torch.equal(made, written.float())


# Gradients.


def test_a_gradient_becomes_a_tensor_when_it_is_read() -> None:
    made, source = make(), Source(gradient())
    made.begin_step(source)
    assert made.is_pending
    assert made.gradient_sources(whole=True) == [source.tensor]
    assert made.factors == ()
    assert source.releases == 0
    assert torch.equal(made.grad, gradient().float())
    assert (made.is_pending, source.releases) == (False, 1)
    assert made.gradient_sources(whole=True) is None
    made.end_step()
    assert torch.equal(made.grad, gradient().float()), "it was not cleared"
    assert memory_of(made) == 0


def test_factors_are_applied_one_by_one() -> None:
    made = make()
    made.begin_step(Source(gradient()))
    made.scale_gradient(1 / 3)
    made.scale_gradient(0.7)
    assert torch.equal(made.grad, gradient().float().mul_(1 / 3).mul_(0.7))
    made.begin_step(Source(gradient()))
    made.grad = None
    made.begin_step(Source(gradient()))
    assert torch.equal(made.grad, gradient().float()), "factors count in one step only"


def test_what_was_not_cleared_is_added_to() -> None:
    made = make()
    for _ in range(2):
        made.begin_step(Source(gradient()))
        made.end_step()
    assert torch.equal(made.grad, gradient().float() + gradient().float())


def test_a_gradient_that_is_cleared_unread_is_released() -> None:
    made, source = make(), Source(gradient())
    made.begin_step(source)
    made.grad = None
    assert (source.gets, source.releases) == (0, 1)
    made.end_step()
    assert made.grad is None


def test_a_parameter_without_a_gradient_has_none() -> None:
    made, source = make(), Source(None)
    made.begin_step(source)
    assert made.gradient_sources(whole=True) is None
    assert made.grad is None
    made.end_step()


def test_other_threads_do_not_see_a_pending_gradient() -> None:
    made, source = make(), Source(gradient(), thread=-1)
    made.begin_step(source)
    assert made.grad is None
    assert (made.is_pending, source.gets) == (True, 0)


# Threads.


def test_no_thread_joins_the_halves_while_the_lock_is_held() -> None:
    made, value = with_lower_bits()
    seen: list[Tensor] = []
    reader = threading.Thread(target=lambda: seen.append(made.sum().detach()), daemon=True)
    with made.lock:
        reader.start()
        reader.join(0.05)
        assert reader.is_alive(), "the reader waits for the lock"
        assert made.halves is not None
        assert memory_of(made) == 0
        made.take_memory()  # a thread that holds the lock need not wait
    reader.join(WAIT_S)
    assert torch.equal(seen[0], value.sum())


def test_a_held_copy_does_not_hold_others_up() -> None:
    held, other = make(1), make(2)
    seen: list[Tensor] = []
    reader = threading.Thread(target=lambda: seen.append(other.detach().clone()), daemon=True)
    with held.lock:
        reader.start()
        reader.join(WAIT_S)
    assert torch.equal(seen[0], weight(2).float())


def test_many_readers_at_once_see_one_value() -> None:
    for seed in range(20):
        made, value = with_lower_bits(seed)
        start, seen = threading.Barrier(4), []

        def read(start: threading.Barrier = start, made: Any = made, seen: list[Any] = seen) -> None:
            start.wait(WAIT_S)
            seen.append(made.detach().clone())

        threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(seen) == 4
        assert all(torch.equal(one, value) for one in seen)
        assert torch.equal(made, value)
