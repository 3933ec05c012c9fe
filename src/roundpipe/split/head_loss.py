"""The head of a language model and its loss in one, where the logits are large and nobody asks for them.

Used by the stub trees. A model of transformers calls `self.loss_function(logits=..., labels=...)`; in a tree that is a
stub, too. Where calibration has shown that the logits go straight from a linear head into a cross entropy over shifted
or unshifted labels, a replay can leave them out: the head returns a placeholder, and the loss is computed from the
head's input, a chunk of tokens at a time.

A linear head and its cross entropy in one step, without the logits of all tokens in memory.

Called by presets, as the last layer of a language model with labels. Knows tensors: no modules, devices or schedules.

With a large vocabulary the logits are by far the largest tensor of a model: 80 000 tokens of 150 000 classes are 48 GB
in float32, and as much again for their gradient. Here tokens pass in chunks. The logits of a chunk become its loss and
its gradient, and are gone before the next chunk begins; what lasts is as large as `hidden` and `weight`.

[Note: when gradients are scaled]
The gradient of the loss arrives in backward, after the chunks. Forward works with the gradient of the loss itself, that
is with the factor 1 / (number of targets): logit gradients get it before they are rounded to the head's dtype, as in a
plain head. Backward multiplies by the gradient of the loss, in float32; where that is 1 or a power of two, nothing is
rounded a second time.
float16 has too few exponents for it: p / n is lost below 6e-8, and the loss scale that would save it is not there yet.
So float16 logits keep gradients between -1 and 1 in forward, and backward applies both factors. Sums over tokens then
grow with their number, so the gradient of the weight is summed in float32, of rows made smaller for each product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundpipe.errors import ConfigError, StaleGraphError
from roundpipe.split.determinism import succeeds
from roundpipe.split.values import Outline, map_leaves, placeholder

LOGITS_BYTES = 512 * 10**6


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    num_items: int | float | Tensor | None = None,
    shift: bool = True,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """The cross entropy of `F.linear(hidden, weight, bias)`, taken in float32, to `labels`: a scalar of float32.

    `hidden` is [..., H], `weight` [V, H], `bias` [V], `labels` [...] on any device. With `shift` a position is to
    predict the label of the next one in its row, and the last position of a row does not count; else its own label.
    Positions whose target is `ignore_index` cost nothing. The result is the mean over the others (NaN if there are
    none), or their sum / `num_items`. float64 is computed, and returned, in float64.

    `logits_bytes` bounds what chunks are made of: tokens x V x 8 bytes, as many as fit, at least one token. Those are
    two float32 tensors, the logits and their logarithmic softmax, which becomes the gradient in place once the logits
    are gone (16 bytes in float64). Everything else that is held has the size of `hidden`, of its rows in a chunk, or
    of `weight`, see `_WeightGradient`.

    Gradients are made in this call, for those of `hidden`, `weight` and `bias` that require one; backward only scales
    them, in place, so it can run once, and not for second derivatives.
    """
    _check(hidden, labels, num_items, logits_bytes)
    targets = shifted(labels, ignore_index) if shift else labels
    flat_targets = targets.reshape(-1).to(hidden.device)
    if isinstance(num_items, Tensor):
        num_items = num_items.to(hidden.device, _loss_dtype(hidden.dtype))
    hidden, weight, bias = _cast_as_autocast_would(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(
            rows, weight, bias, flat_targets, num_items, ignore_index, logits_bytes, torch.is_grad_enabled()
        )
    return loss


def shifted(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """What each position is to predict: the label of the one after it, and nothing for the last of a row."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        num_items: int | float | Tensor | None,
        ignore_index: int,
        logits_bytes: int,
        grad_mode: bool,
    ) -> Tensor:
        # The one wait for the device, if all tensors are there: to make chunks the host must know how many rows count.
        counted = (targets != ignore_index).nonzero().squeeze(1)
        loss_sum = hidden.new_zeros((), dtype=_loss_dtype(hidden.dtype))
        chunks = _chunks(counted, 2 * loss_sum.element_size() * weight.shape[0], logits_bytes)
        divisor = counted.numel() if num_items is None else num_items
        gradients = None
        # needs_input_grad knows the inputs, not whether a graph is recorded.
        if grad_mode and any(ctx.needs_input_grad):
            scale = torch.ones_like(loss_sum) / divisor
            gradients = _Gradients(ctx.needs_input_grad[:3], hidden, weight, scale, len(chunks))
        for positions in chunks:
            _run_chunk(positions, (hidden, weight, bias), targets, ignore_index, loss_sum, gradients)
        if gradients is not None:
            gradients.settle()
        ctx.gradients = gradients
        return loss_sum / divisor

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients have no graph: who asks for one would take them for constants and get a wrong result.
        if torch.is_grad_enabled():
            raise StaleGraphError(
                "a second derivative (create_graph=True) cannot be taken through linear_cross_entropy; use a linear "
                "layer and cross_entropy for it."
            )
        if ctx.gradients is None:
            raise StaleGraphError(
                "backward through this linear_cross_entropy ran already and its gradients are gone; call it again."
            )
        # Let go of, so that autograd can hand these very tensors on instead of copies.
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.scaled(loss_grad), None, None, None, None, None)


def _run_chunk(
    positions: Tensor,
    head: tuple[Tensor, Tensor, Tensor | None],
    targets: Tensor,
    ignore_index: int,
    loss_sum: Tensor,
    gradients: _Gradients | None,
) -> None:
    """Add the losses of `positions` to `loss_sum`, and what follows from them to `gradients`.

    A function of its own, so that nothing of a chunk is alive when the next one begins.
    """
    hidden, weight, bias = head
    rows, row_targets = hidden.index_select(0, positions), targets.index_select(0, positions)
    logits = F.linear(rows, weight, bias)
    logits = logits.to(loss_sum.dtype)
    log_softmax = torch.log_softmax(logits, -1)
    del logits
    # No row is ignored here; without the argument a label of -100 would be, whatever `ignore_index` is.
    loss_sum += F.nll_loss(log_softmax, row_targets, ignore_index=ignore_index, reduction="sum")
    if gradients is not None:
        gradients.add(positions, rows, log_softmax, row_targets)


class _Gradients:
    """The gradients of `hidden`, `weight` and `bias`, as far as they are wanted: the sum over chunks, then scaled."""

    def __init__(
        self, wanted: tuple[bool, bool, bool], hidden: Tensor, weight: Tensor, scale: Tensor, num_chunks: int
    ) -> None:
        hidden_wanted, weight_wanted, bias_wanted = wanted
        one = torch.ones_like(scale)
        # See [Note: when gradients are scaled]. Without chunks all is zero, and scale may be infinite.
        self._scale_before, self._scale_after = (one, scale) if weight.dtype is torch.float16 else (scale, one)
        if not num_chunks:
            self._scale_after = one
        self._head_weight = weight
        self._hidden = torch.zeros_like(hidden) if hidden_wanted else None
        self._weight = _WeightGradient(weight, num_chunks) if weight_wanted else None
        self._bias = scale.new_zeros(weight.shape[0]) if bias_wanted else None

    def add(self, positions: Tensor, rows: Tensor, log_softmax: Tensor, row_targets: Tensor) -> None:
        """One chunk's part; overwrites `log_softmax`. `positions` says where in `hidden` the rows are from."""
        logits_grad = log_softmax.exp_().mul_(self._scale_before)
        at_target = row_targets.unsqueeze(1)
        logits_grad.scatter_(1, at_target, logits_grad.gather(1, at_target) - self._scale_before)
        if self._bias is not None:
            self._bias += logits_grad.sum(0)
        logits_grad = logits_grad.to(self._head_weight.dtype)
        if self._hidden is not None:
            self._hidden.index_copy_(0, positions, logits_grad @ self._head_weight)
        if self._weight is not None:
            self._weight.add(logits_grad, rows)

    def settle(self) -> None:
        """All chunks are in."""
        if self._weight is not None:
            self._weight.settle()

    def scaled(self, loss_grad: Tensor) -> list[Tensor | None]:
        """The gradients, for a loss with the gradient `loss_grad`; this object is spent."""
        # One dimension, because a device may round a factor without any to the dtype of what it multiplies.
        factor = (loss_grad * self._scale_after).reshape(1)
        sums = (self._hidden, None if self._weight is None else self._weight.total, self._bias)
        dtype = self._head_weight.dtype
        return [None if one is None else one.mul_(factor).to(dtype) for one in sums]


class _WeightGradient:
    """The sum of logits_grad.T @ rows over all chunks, as large as the weight.

    A bfloat16 sum of many chunks would stop growing: a part 256 times smaller than the sum is rounded away. So with
    more than one chunk low precision is summed in float32: 4 bytes for each element of the weight, and 2 for the
    product of one chunk, which matrix kernels give in the precision of what they multiply. After the last chunk a
    bfloat16 gradient is all that is left. float16 is always summed so, and stays float32 until backward has scaled it.
    """

    def __init__(self, weight: Tensor, num_chunks: int) -> None:
        self._is_half = weight.dtype is torch.float16
        apart = self._is_half or (weight.dtype is torch.bfloat16 and num_chunks > 1)
        self.total = torch.zeros_like(weight, dtype=torch.float32 if apart else None)
        self._part = torch.empty_like(weight) if apart else None

    def add(self, logits_grad: Tensor, rows: Tensor) -> None:
        if self._part is None:
            self.total.addmm_(logits_grad.T, rows)
            return
        # Elements of the product are below 16 times the largest of `rows`, however many rows there are.
        down = 2.0 ** max(0, (len(rows) - 1).bit_length() - 4) if self._is_half else 1.0
        torch.mm(logits_grad.T, rows / down if down > 1.0 else rows, out=self._part)
        self.total.add_(self._part, alpha=down)

    def settle(self) -> None:
        """All chunks are in: keep what backward needs and no more."""
        if self._part is not None and not self._is_half:
            self.total = self._part.copy_(self.total)
        self._part = None


def _chunks(counted: Tensor, bytes_per_row: int, logits_bytes: int) -> tuple[Tensor, ...]:
    """`counted` in parts of about one size, the fewest that hold no more than `logits_bytes` each; none of nothing."""
    num_counted = counted.numel()
    if not num_counted:
        return ()
    max_rows = max(1, logits_bytes // bytes_per_row)
    return counted.tensor_split(-(-num_counted // max_rows))


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _cast_as_autocast_would(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as a linear layer would use them here: float64 is left alone.

    Not left to autocast itself: what it casts it keeps, also where no graph is recorded as in our forward, and the same
    weight used again by the caller would then have no gradient.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)

    def cast(operand: Tensor) -> Tensor:
        return operand if operand.dtype is torch.float64 else operand.to(dtype)

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def _check(hidden: Tensor, labels: Tensor, num_items: int | float | Tensor | None, logits_bytes: int) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"labels of shape {tuple(labels.shape)} do not fit hidden of shape {tuple(hidden.shape)}: "
            f"one label for each vector is needed, that is shape {tuple(hidden.shape[:-1])}."
        )
    if isinstance(num_items, Tensor) and num_items.ndim:
        raise ConfigError(f"num_items must be a number or a tensor without dimensions, got {tuple(num_items.shape)}.")
    if logits_bytes < 1:
        raise ConfigError(f"logits_bytes must be at least 1, got {logits_bytes}.")


_CLOSE = 1e-5


@dataclasses.dataclass(frozen=True)
class FusedHead:
    """Which tap is the head, whether position i is to predict label i + 1, and the loss function that showed it."""

    tap: int
    shift: bool
    loss_function: Any = dataclasses.field(compare=False)


class _Marker(torch.Tensor):
    """Stands for the logits until the loss function gets it; whatever is computed from it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Itself, as of logits a linear layer returned."""
        return self


class HeadLoss:
    """The fused computation in one replay of an epilogue."""

    def __init__(self, head: FusedHead) -> None:
        self.head = head
        self._hidden: torch.Tensor | None = None
        self._module: nn.Linear | None = None
        self._marker: torch.Tensor | None = None

    def call_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert isinstance(module, nn.Linear)
        (self._hidden,) = args or tuple(kwargs.values())
        self._module = module
        outline = Outline(torch.Size([*self._hidden.shape[:-1], module.out_features]), self._hidden.dtype)
        self._marker = placeholder(outline, self._hidden.device).as_subclass(_Marker)
        return self._marker

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._marker is not None and (
            kwargs.get("logits") is self._marker or (bool(args) and args[0] is self._marker)
        )

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert self._hidden is not None
        assert self._module is not None
        given = {**dict(zip(("logits", "labels", "vocab_size"), args, strict=False)), **kwargs}
        shifted = given.get("shift_labels")
        return linear_cross_entropy(
            self._hidden,
            self._module.weight,
            self._module.bias,
            given["labels"] if shifted is None else shifted,
            ignore_index=given.get("ignore_index", -100),
            num_items=given.get("num_items_in_batch"),
            shift=self.head.shift and shifted is None,
        )

    def plain_loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By another function than the one it was tried with: on the logits, which are made after all."""
        assert self._module is not None
        logits = self._module(self._hidden)

        def instead(value: Any) -> Any:
            return logits if value is self._marker else value

        return plain(*map(instead, args), **{name: instead(value) for name, value in kwargs.items()})

    def without_marker(self, returned: Any) -> Any:
        """What the model returned, with None for the logits."""
        return map_leaves(lambda leaf: None if leaf is self._marker else leaf, returned)


def are_large(hidden: torch.Tensor, module: nn.Module) -> bool:
    """Whether logits would take more memory than is set for them."""
    num_rows = hidden.numel() // max(hidden.shape[-1], 1)
    return isinstance(module, nn.Linear) and num_rows * module.out_features * 8 > LOGITS_BYTES


def can_be_fused(head: nn.Module) -> bool:
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def find_head(
    logits: torch.Tensor,
    loss: torch.Tensor,
    taps: list[tuple[nn.Module, torch.Tensor, torch.Tensor]],
    given: dict[str, Any],
    loss_function: Any,
) -> FusedHead | None:
    """The head whose very output `logits` is, if `loss` is the cross entropy that can be fused with it.

    taps: (module, its first argument, its output), in the order of their calls.
    """
    labels = given.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    for t, (module, hidden, output) in enumerate(taps):
        if output is logits and can_be_fused(module) and labels.shape == logits.shape[:-1]:
            for shift in (True, False):
                fused = HeadLoss(FusedHead(t, shift, loss_function))
                if succeeds("the head is fused with the loss", partial(_gives, fused, module, hidden, given, loss)):
                    return fused.head
    return None


def _gives(fused: HeadLoss, module: nn.Module, hidden: torch.Tensor, given: dict[str, Any], loss: torch.Tensor) -> bool:
    """Whether the fused computation gives the loss."""
    fused.call_head(module, (hidden,), {})
    with torch.no_grad():
        found = fused.loss((), given)
    return bool((found.double() - loss.double()).abs() <= _CLOSE * loss.double().abs())
