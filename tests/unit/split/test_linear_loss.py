"""linear_cross_entropy equals the head and loss of a plain causal language model, in a bounded amount of memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe.errors import ConfigError, StaleGraphError
from roundpipe.split.head_loss import LOGITS_BYTES, linear_cross_entropy, shifted

WIDTH = 24
VOCAB = 37
IGNORED = -100
ROWS_PER_CHUNK = [1, 5, 1000]  # one token at a time; a last chunk that is smaller; all in one

Head = Callable[..., Tensor]


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """New leaf tensors with the same values, rounded to `dtype`."""
        hidden, weight, bias = (
            None if leaf is None else leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
            for leaf in (self.hidden, self.weight, self.bias)
        )
        assert hidden is not None
        assert weight is not None
        return replace(self, hidden=hidden, weight=weight, bias=bias)

    def run(self, head: Head, loss_grad: float = 1.0, **options: Any) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss and the gradients of its backward."""
        for leaf in self.leaves:
            leaf.grad = None
        loss = head(self.hidden, self.weight, self.bias, self.labels, **options)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, loss_grad))
        return loss.detach(), [leaf.grad for leaf in self.leaves]


def case(
    dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 7), with_bias: bool = True, vocab: int = VOCAB
) -> Case:
    generator = torch.Generator().manual_seed(11)

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    return Case(leaf(*shape, WIDTH), leaf(vocab, WIDTH), leaf(vocab) if with_bias else None, labels)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = IGNORED,
    num_items: int | Tensor | None = None,
    shift: bool = True,
) -> Tensor:
    """The head and the loss of a plain causal language model. float64 is not rounded to float32."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items is None else "sum"
    logits, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items is None else loss / num_items


def chunked(rows: int, itemsize: int = 4, vocab: int = VOCAB) -> int:
    """The `logits_bytes` that makes chunks of up to `rows` tokens: logits and their gradient, in the loss's dtype."""
    return rows * vocab * 2 * itemsize


def assert_agree(
    actual: tuple[Tensor, list[Tensor | None]], expected: tuple[Tensor, list[Tensor | None]], tolerance: float
) -> None:
    """`tolerance`: relative to each number, and to the largest of its tensor, for sums in which terms cancel."""
    for ours, theirs in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


# Sums of at most VOCAB = 37 terms, of numbers of about 1: some ten roundings of 1.1e-16 (float64) or 6e-8 (float32)
# that differ in order. 1e-12 leaves no room for a formula that is off; 1e-6 is 16 roundings of float32.
EXACT = 1e-12
SINGLE = 1e-6


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("shape", [(3, 7), (19,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_loss_and_gradients_are_those_of_a_plain_head(
    rows: int, with_bias: bool, shape: tuple[int, ...], num_items: int | Tensor | None, shift: bool
) -> None:
    given = case(shape=shape, with_bias=with_bias)
    options: dict[str, Any] = {"num_items": num_items, "shift": shift}
    ours = given.run(linear_cross_entropy, logits_bytes=chunked(rows, itemsize=8), **options)
    assert_agree(ours, given.run(plain, **options), EXACT)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_single_precision_is_as_close_as_its_rounding(rows: int, with_bias: bool) -> None:
    given = case(torch.float32, with_bias=with_bias)
    ours = given.run(linear_cross_entropy, logits_bytes=chunked(rows))
    assert ours[0].dtype is torch.float32
    assert_agree(ours, given.run(plain), SINGLE)


def test_one_chunk_of_single_precision_gives_the_very_loss_of_a_plain_head() -> None:
    """Same kernels on the same rows, when no row is left out."""
    given = case(torch.float32)
    given.labels[given.labels == IGNORED] = 1
    ours, theirs = given.run(linear_cross_entropy, shift=False), given.run(plain, shift=False)
    assert torch.equal(ours[0], theirs[0])


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    given = case()
    expected = given.run(plain)
    hidden = given.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = given.weight.detach().T.contiguous().T.requires_grad_()
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    strided = replace(given, hidden=hidden, weight=weight)
    assert_agree(strided.run(linear_cross_entropy, logits_bytes=chunked(4, itemsize=8)), expected, EXACT)


def test_gradients_reach_the_tensors_that_hidden_was_computed_from() -> None:
    """With tied embeddings the weight is used twice, and both parts of its gradient are added."""
    given = case(with_bias=False)
    tokens = given.labels.clamp(min=0)

    def tied(head: Head) -> Tensor:
        weight = given.weight.detach().requires_grad_()
        head(F.embedding(tokens, weight).tanh(), weight, None, given.labels).backward()
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(tied(linear_cross_entropy), tied(plain), rtol=EXACT, atol=EXACT)


# Low precision.


def error_bounds(given: Case) -> tuple[float, list[Tensor]]:
    """What rounding to the dtype of `given` may do to the loss and to each gradient, for a loss gradient of 1 or more.

    Derived from the float64 probabilities p of the same numbers. With the unit roundoff u a logit is off by u |logit|,
    at most u L; its log-softmax moves by at most twice that, and p by 2 u L p. Then the logit gradient is rounded, a
    product of a chunk, and the result: 3 u more. (Sums inside kernels, and of chunks, are in float32.) A gradient is a
    sum of logit gradients, each at most (p + 1 at the target) / n, times something: the same sum of absolute values
    bounds its error. Where numbers get so small that steps no longer shrink, a rounding costs half a step instead.
    """
    kind = torch.finfo(given.weight.dtype)
    unit, half_step = kind.eps / 2, kind.smallest_normal * kind.eps / 2
    exact = given.to(torch.float64)
    targets = shifted(exact.labels).reshape(-1)
    counted = targets != IGNORED
    rows, weight = exact.hidden.detach().reshape(-1, WIDTH), exact.weight.detach()
    logits = F.linear(rows[counted], weight, None if exact.bias is None else exact.bias.detach())
    largest = logits.abs().max().item()
    size = logits.softmax(-1) + F.one_hot(targets[counted], logits.shape[-1])
    error = torch.zeros(len(rows), len(weight), dtype=torch.float64)
    error[counted] = ((3 + 2 * largest) * unit * size + half_step) / len(size)
    sums = [(error @ weight.abs()).view_as(exact.hidden), error.T @ rows.abs(), error.sum(0)]
    return 2 * largest * unit, [one + 3 * half_step for one in sums]


def assert_within_rounding(actual: tuple[Tensor, list[Tensor | None]], given: Case, loss_grad: float = 1.0) -> None:
    loss, gradients = given.to(torch.float64).run(plain)
    loss_bound, gradient_bounds = error_bounds(given)
    assert abs(actual[0].double() - loss) <= loss_bound
    for ours, exact, bound in zip(actual[1], gradients, gradient_bounds, strict=False):  # there may be no bias
        assert ours is not None
        assert exact is not None
        assert ((ours.double() / loss_grad - exact).abs() <= bound).all()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_bfloat16_is_as_close_as_its_rounding(rows: int, with_bias: bool) -> None:
    given = case(torch.bfloat16, with_bias=with_bias)
    ours = given.run(linear_cross_entropy, logits_bytes=chunked(rows))
    assert ours[0].dtype is torch.float32
    assert all(grad is not None and grad.dtype is torch.bfloat16 for grad in ours[1])
    assert_within_rounding(ours, given)


def test_bfloat16_gradients_of_many_chunks_do_not_stop_growing() -> None:
    """1500 equal parts: a bfloat16 sum would stay at 256 of them."""
    given = case(torch.bfloat16, shape=(1501,))
    given.hidden.detach()[:] = given.hidden.detach()[:1]
    given.labels[:] = 5
    assert_within_rounding(given.run(linear_cross_entropy, logits_bytes=chunked(1)), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_the_gradient_of_the_loss_scales_gradients_without_being_rounded_itself(rows: int, dtype: torch.dtype) -> None:
    """1/3 is 0.334 in bfloat16: rounded to it, every element would be off by the same 0.2 %."""
    given = case(dtype)
    _, whole = given.run(linear_cross_entropy, logits_bytes=chunked(rows))
    _, third = given.run(linear_cross_entropy, loss_grad=1 / 3, logits_bytes=chunked(rows))
    for one, scaled in zip(whole, third, strict=True):
        assert one is not None
        assert scaled is not None
        expected = (one.float() * torch.tensor(1 / 3)).to(dtype)
        if one.dim() > 1:  # a bias keeps its float32 sum until here, and so is rounded once only
            assert torch.equal(scaled, expected)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_float16_is_as_close_as_its_rounding(loss_scale: float, rows: int, with_bias: bool) -> None:
    given = case(torch.float16, with_bias=with_bias)
    ours = given.run(linear_cross_entropy, loss_grad=loss_scale, logits_bytes=chunked(rows))
    assert all(grad is not None and grad.dtype is torch.float16 for grad in ours[1])
    assert_within_rounding(ours, given, loss_scale)


@pytest.mark.parametrize("rows", [100, 10_000])
def test_a_loss_scale_prevents_float16_underflow_although_it_arrives_in_backward(rows: int) -> None:
    """Uniform over 4096 classes and 1000 tokens: logit gradients of 2.4e-7, lost but for two bits without the scale."""
    vocab, tokens, scale = 4096, 1000, 2.0**14
    hidden = torch.full((tokens, WIDTH), 0.01, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(vocab, WIDTH, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    given = Case(hidden, weight, None, labels)
    options: dict[str, Any] = {"shift": False, "logits_bytes": chunked(rows, vocab=vocab)}
    _, (_, grad) = given.run(linear_cross_entropy, loss_grad=scale, **options)
    assert grad is not None
    # Everywhere but at class 0: mean over tokens of p * 0.01, exactly 0.01 / 4096. Two roundings of float16.
    expected = hidden[0, 0].double().item() / vocab * scale
    torch.testing.assert_close(
        grad[1:].double(), torch.full_like(grad[1:], expected, dtype=torch.float64), rtol=2**-10, atol=0
    )


def test_float16_gradients_of_many_tokens_do_not_overflow() -> None:
    """4000 tokens with features of 100: the sum of 400 000 is no float16, the mean of 100 is."""
    hidden = torch.full((4000, WIDTH), 100.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(VOCAB, WIDTH, dtype=torch.float16, requires_grad=True)
    given = Case(hidden, weight, None, torch.zeros(4000, dtype=torch.long))
    _, (_, grad) = given.run(linear_cross_entropy, shift=False)
    _, (_, expected) = given.to(torch.float64).run(plain, shift=False)
    assert grad is not None
    assert expected is not None
    torch.testing.assert_close(
        grad.double(), expected, rtol=2**-9, atol=0
    )  # three roundings: p, the product, the result


@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_autocast_computes_what_a_plain_head_computes_under_it(rows: int) -> None:
    given = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = given.run(linear_cross_entropy, logits_bytes=chunked(rows))
    assert ours[0].dtype is torch.float32
    assert all(grad is not None and grad.dtype is torch.float32 for grad in ours[1])
    # Roundings of the operands are those of bfloat16 leaves, whose float64 result is the reference.
    assert_within_rounding(ours, given.to(torch.bfloat16))


def test_autocast_leaves_float64_alone() -> None:
    given = case()
    expected = given.run(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert_agree(given.run(linear_cross_entropy), expected, EXACT)


def test_a_weight_used_again_under_autocast_still_has_its_gradient() -> None:
    """Autocast caches weights that it has cast; one cast without a graph would be used by the linear below."""
    given = case(torch.float32, with_bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(given.hidden, given.weight, None, given.labels)
        F.linear(given.hidden, given.weight).sum().backward()
    assert given.weight.grad is not None


# Positions that do not count.


def test_ignored_positions_get_no_gradient() -> None:
    given = case()
    _, (hidden_grad, _, _) = given.run(linear_cross_entropy)
    assert hidden_grad is not None
    ignored = shifted(given.labels) == IGNORED
    assert ignored.any()
    assert torch.equal(hidden_grad[ignored], torch.zeros_like(hidden_grad[ignored]))
    assert (hidden_grad[~ignored] != 0).any(-1).all()


@pytest.mark.parametrize("ignore_index", [0, -1, VOCAB])
def test_any_ignore_index_works(ignore_index: int) -> None:
    given = case()
    given.labels[given.labels == IGNORED] = ignore_index
    ours = given.run(linear_cross_entropy, ignore_index=ignore_index, logits_bytes=chunked(4, itemsize=8))
    assert_agree(ours, given.run(plain, ignore_index=ignore_index), EXACT)


@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5), 0], ids=["mean", "int", "tensor", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_any_target_the_result_is_that_of_a_plain_head(
    dtype: torch.dtype, num_items: int | Tensor | None
) -> None:
    """The mean over no targets is NaN, the sum is 0; gradients are zeros in both cases."""
    given = case(dtype)
    given.labels[:] = IGNORED
    ours, theirs = given.run(linear_cross_entropy, num_items=num_items), given.run(plain, num_items=num_items)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert all(grad is not None and not grad.any() for grad in ours[1])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 1)], ids=str)
def test_rows_too_short_to_predict_anything(shape: tuple[int, ...]) -> None:
    given = case(shape=shape)
    torch.testing.assert_close(given.run(linear_cross_entropy), given.run(plain), equal_nan=True)


def test_num_items_zero_divides_by_it() -> None:
    given = case()
    assert given.run(linear_cross_entropy, num_items=0)[0] == given.run(plain, num_items=0)[0] == float("inf")


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("rows", ROWS_PER_CHUNK)
def test_a_frozen_operand_gets_no_gradient_and_does_not_change_the_others(rows: int, frozen: str) -> None:
    given = case()
    getattr(given, frozen).requires_grad_(False)
    ours = given.run(linear_cross_entropy, logits_bytes=chunked(rows, itemsize=8))
    assert [grad is None for grad in ours[1]] == [not leaf.requires_grad for leaf in given.leaves]
    assert_agree(ours, given.run(plain), EXACT)


# Work and memory.


class Record(TorchDispatchMode):
    """Which operations ran, the largest floating point tensor they made, and the most bytes alive of those like logits.

    Like logits: the last dimension is VOCAB. Operations in place and views make nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest_numel = 0
        self.peak_logits_bytes = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        self.operations[func.overloadpacket.__name__] += 1
        for tensor in tree_leaves(made):
            is_new = isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given
            if is_new and tensor.is_floating_point():
                self._made(tensor)
        return made

    def _made(self, tensor: Tensor) -> None:
        self.largest_numel = max(self.largest_numel, tensor.numel())
        self.shapes.add(tuple(tensor.shape))
        storage = tensor.untyped_storage()
        if tensor.dim() < 2 or tensor.shape[-1] != VOCAB:
            return
        self._alive[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(tensor, self._alive.pop, storage.data_ptr(), None)
        self.peak_logits_bytes = max(self.peak_logits_bytes, sum(self._alive.values()))


MANY = (16, 256)  # tokens; with VOCAB classes the largest tensor by far, unless it comes in chunks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_grad", [True, False])
def test_no_more_logits_exist_than_were_allowed(with_grad: bool, dtype: torch.dtype) -> None:
    rows, given = 16, case(dtype, shape=MANY)
    allowed = chunked(rows, itemsize=8 if dtype is torch.float64 else 4)
    with Record() as record, torch.set_grad_enabled(with_grad):
        given.run(linear_cross_entropy, logits_bytes=allowed)
    largest_that_lasts = max(given.hidden.numel() if with_grad else 0, given.weight.numel())
    assert record.largest_numel <= max(rows * VOCAB, largest_that_lasts)
    assert (rows, VOCAB) in record.shapes
    assert 0 < record.peak_logits_bytes <= allowed


def test_the_memory_record_notices_the_logits_of_a_plain_head() -> None:
    given = case(torch.float32, shape=MANY)
    with Record() as record:
        given.run(plain)
    assert record.largest_numel == given.labels.numel() * VOCAB
    assert record.peak_logits_bytes >= 2 * 4 * record.largest_numel


def test_a_budget_below_one_token_still_runs() -> None:
    given = case()
    assert_agree(given.run(linear_cross_entropy, logits_bytes=1), given.run(plain), EXACT)


def test_only_rows_that_count_are_computed_and_in_even_chunks() -> None:
    given = case(shape=(40,))
    given.labels[:] = IGNORED
    given.labels[20:31] = 3
    with Record() as record:
        given.run(linear_cross_entropy, logits_bytes=chunked(10, itemsize=8))
    logits = {shape for shape in record.shapes if len(shape) == 2 and shape[1] == VOCAB}
    assert logits == {(6, VOCAB), (5, VOCAB)}


def products(record: Record) -> int:
    return sum(record.operations[name] for name in ("mm", "addmm", "addmm_"))


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1), (("hidden", "weight", "bias"), 1)],
)
def test_gradients_that_are_not_required_are_not_computed(frozen: tuple[str, ...], expected: int) -> None:
    given = case()
    for name in frozen:
        getattr(given, name).requires_grad_(False)
    with Record() as record:
        given.run(linear_cross_entropy)
    assert products(record) == expected
    assert record.operations["exp_"] == (len(frozen) < 3)


def test_without_grad_mode_only_the_loss_is_computed() -> None:
    given = case()
    with Record() as record, torch.no_grad():
        loss, gradients = given.run(linear_cross_entropy)
    assert products(record) == 1
    assert not record.operations["exp_"]
    assert gradients == [None, None, None]
    assert torch.equal(loss, given.run(linear_cross_entropy)[0])


def test_the_host_waits_for_the_device_once() -> None:
    """`nonzero` asks the device for a size; `_local_scalar_dense` is a number read from it."""
    given = case(shape=(40,))
    with Record() as record:
        given.run(linear_cross_entropy, num_items=torch.tensor(9), logits_bytes=chunked(4, itemsize=8))
    assert record.operations["nonzero"] == 1
    assert not record.operations["_local_scalar_dense"]


def test_the_default_budget_holds_hundreds_of_tokens_of_a_large_vocabulary() -> None:
    assert 256 <= LOGITS_BYTES // chunked(1, vocab=151_936) <= 1024


# Refused.


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize(("label", "ignore_index"), [(VOCAB, IGNORED), (-1, IGNORED), (IGNORED, -1)])
def test_labels_out_of_range_are_refused_as_by_a_plain_head(label: int, ignore_index: int, with_grad: bool) -> None:
    given = case()
    given.labels[given.labels == IGNORED] = 0
    given.labels[1, 2] = label
    with torch.set_grad_enabled(with_grad):
        with pytest.raises((IndexError, RuntimeError)) as theirs:
            given.run(plain, ignore_index=ignore_index)
        with pytest.raises(theirs.type):
            given.run(linear_cross_entropy, ignore_index=ignore_index)


def test_backward_runs_once() -> None:
    given = case()
    loss = linear_cross_entropy(given.hidden, given.weight, given.bias, given.labels)
    loss.backward(retain_graph=True)
    with pytest.raises(StaleGraphError, match="ran already"):
        loss.backward()


def test_second_derivatives_are_refused() -> None:
    given = case()
    loss = linear_cross_entropy(given.hidden, given.weight, given.bias, given.labels)
    with pytest.raises(StaleGraphError, match="second derivative"):
        torch.autograd.grad(loss, given.hidden, create_graph=True)


def test_labels_must_fit_hidden() -> None:
    given = case()
    with pytest.raises(ConfigError, match=r"labels of shape \(3, 6\) do not fit hidden of shape \(3, 7, 24\)"):
        linear_cross_entropy(given.hidden, given.weight, given.bias, given.labels[:, 1:])


def test_num_items_must_be_one_number() -> None:
    given = case()
    with pytest.raises(ConfigError, match="num_items"):
        linear_cross_entropy(given.hidden, given.weight, given.bias, given.labels, num_items=torch.tensor([3]))


def test_a_budget_of_nothing_is_refused() -> None:
    given = case()
    with pytest.raises(ConfigError, match="logits_bytes must be at least 1, got 0"):
        linear_cross_entropy(given.hidden, given.weight, given.bias, given.labels, logits_bytes=0)


def test_shifted_labels_are_those_of_the_next_position() -> None:
    labels = torch.tensor([[1, 2, 3], [4, -7, 6]])
    assert shifted(labels, ignore_index=-7).tolist() == [[2, 3, -7], [-7, 6, -7]]
    assert shifted(labels[0]).tolist() == [2, 3, IGNORED]
