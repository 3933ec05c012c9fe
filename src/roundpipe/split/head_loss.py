"""The head of a language model fused with its loss: the logits of all tokens are never in memory at once.

With a large vocabulary the logits are by far the largest tensor of a model: 80 000 tokens of 150 000 classes are 48 GB
in float32, and as much again for their gradient. `linear_cross_entropy` processes tokens in chunks. It computes a
chunk's logits, loss and gradients, and frees the logits before the next chunk. Only tensors of the size of `hidden` and
`weight` remain.

A transformers model calls `self.loss_function(logits=..., labels=...)`. If calibration shows that a linear head's
output goes unchanged into a cross entropy over shifted or unshifted labels, a replay uses a `HeadLoss`: the head
returns a placeholder for the logits, and the loss function computes the loss from the head's input.

[Note: when gradients are scaled]
The gradient of the loss arrives in backward, after all chunks. Forward computes the gradients of the mean loss, that is
with the factor 1 / (number of targets). Logit gradients are multiplied by this factor before they are rounded to the
head's dtype, as in a head that is not fused. Backward multiplies the results by the gradient of the loss in float32. If
the gradient of the loss is 1 or a power of two, as with a loss scale, this causes no second rounding.
float16 has too small a range for this: p / n underflows below 6e-8, and the loss scale that prevents it arrives only in
backward. So for float16 forward keeps logit gradients between -1 and 1, and backward applies both factors. Sums over
tokens then grow with the number of tokens, so the gradient of the weight is summed in float32, and rows are scaled down
for each product.
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

LOGITS_BYTES = 512 * 10**6  # default limit of the memory for the logits of one chunk
# Accepted relative difference between the fused loss and the model's loss, which add numbers in different orders.
_CLOSE = 1e-5


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
    """Return the cross entropy between `F.linear(hidden, weight, bias)` and `labels`, a scalar of float32.

    `hidden` is [..., H], `weight` [V, H], `bias` [V], `labels` [...] on any device. With `shift`, the target of a
    position is the label of the next position in its row, and the last position of a row does not count. Without it,
    the target is the position's label. Positions whose target is `ignore_index` do not count. The result is the mean
    over the positions that count (NaN if there are none), or their sum / `num_items`. It is computed in float32, and
    for float64 inputs in float64.

    `logits_bytes` limits the size of a chunk: tokens x V x 8 bytes, but at least one token. The 8 bytes are two float32
    tensors, the logits and their log-softmax; the log-softmax becomes the gradient in place after the logits are freed.
    (16 bytes in float64.) All other tensors have the size of `hidden`, of its rows in a chunk, or of `weight`, see
    `_WeightGradient`.

    The gradients of `hidden`, `weight` and `bias` are computed in this call, if they require grad. Backward only scales
    them, in place, so it can run once, and second derivatives are not supported.
    """
    _check(hidden, labels, num_items, logits_bytes)
    targets = shifted(labels, ignore_index) if shift else labels
    flat_targets = targets.reshape(-1).to(hidden.device)
    if isinstance(num_items, Tensor):
        num_items = num_items.to(hidden.device, _loss_dtype(hidden.dtype))
    hidden, weight, bias = _cast_as_autocast_would(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = LinearCrossEntropy.apply(
            rows, weight, bias, flat_targets, num_items, ignore_index, logits_bytes, torch.is_grad_enabled()
        )
    return loss


def shifted(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the target of each position: the label of the next position; `ignore_index` for the last one of a row."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class LinearCrossEntropy(torch.autograd.Function):
    """The autograd function behind `linear_cross_entropy`; `hidden` is [tokens, H], `targets` [tokens]."""

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
        # nonzero() is the only synchronisation with the device: the host needs the number of rows to make chunks.
        counted = (targets != ignore_index).nonzero().squeeze(1)
        loss_sum = hidden.new_zeros((), dtype=_loss_dtype(hidden.dtype))
        chunks = _chunks(counted, 2 * loss_sum.element_size() * weight.shape[0], logits_bytes)
        divisor = counted.numel() if num_items is None else num_items
        gradients = None
        # needs_input_grad is also True under no_grad, so the grad mode is checked, too.
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
        # The gradients have no graph, so a second derivative would silently treat them as constants.
        if torch.is_grad_enabled():
            raise StaleGraphError(
                "a second derivative (create_graph=True) cannot be taken through linear_cross_entropy; use a linear "
                "layer and cross_entropy for it."
            )
        if ctx.gradients is None:
            raise StaleGraphError(
                "backward through this linear_cross_entropy ran already and its gradients were freed; call "
                "linear_cross_entropy again for another backward."
            )
        # Drop the reference in ctx, so that autograd can use these tensors as .grad without copying them.
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
    """Add the losses of the rows at `positions` to `loss_sum`, and their gradients to `gradients`.

    This is a separate function, so that all tensors of a chunk are freed before the next chunk begins.
    """
    hidden, weight, bias = head
    rows, row_targets = hidden.index_select(0, positions), targets.index_select(0, positions)
    logits = F.linear(rows, weight, bias)
    logits = logits.to(loss_sum.dtype)
    log_softmax = torch.log_softmax(logits, -1)
    del logits
    # Rows to ignore are already left out. ignore_index is passed because nll_loss ignores -100 by default.
    loss_sum += F.nll_loss(log_softmax, row_targets, ignore_index=ignore_index, reduction="sum")
    if gradients is not None:
        gradients.add(positions, rows, log_softmax, row_targets)


class _Gradients:
    """The gradients of `hidden`, `weight` and `bias`, as far as wanted. Sums them over chunks; backward scales them."""

    def __init__(
        self, wanted: tuple[bool, bool, bool], hidden: Tensor, weight: Tensor, scale: Tensor, num_chunks: int
    ) -> None:
        hidden_wanted, weight_wanted, bias_wanted = wanted
        one = torch.ones_like(scale)
        # See [Note: when gradients are scaled]. Without chunks all gradients are zero, and scale may be infinite.
        self._scale_before, self._scale_after = (one, scale) if weight.dtype is torch.float16 else (scale, one)
        if not num_chunks:
            self._scale_after = one
        self._head_weight = weight
        self._hidden = torch.zeros_like(hidden) if hidden_wanted else None
        self._weight = _WeightGradient(weight, num_chunks) if weight_wanted else None
        self._bias = scale.new_zeros(weight.shape[0]) if bias_wanted else None

    def add(self, positions: Tensor, rows: Tensor, log_softmax: Tensor, row_targets: Tensor) -> None:
        """Add one chunk; overwrites `log_softmax`. positions: the indices of the rows in `hidden`."""
        # The gradient of the cross entropy is softmax - one_hot(target).
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
        """Free the memory that backward does not need. Must be called after the last chunk."""
        if self._weight is not None:
            self._weight.settle()

    def scaled(self, loss_grad: Tensor) -> list[Tensor | None]:
        """Return the gradients for a loss whose gradient is `loss_grad`. Scales in place, so it can be called once."""
        # The factor has one dimension because a device may round a 0-dim factor to the dtype of the other operand.
        factor = (loss_grad * self._scale_after).reshape(1)
        sums = (self._hidden, None if self._weight is None else self._weight.total, self._bias)
        dtype = self._head_weight.dtype
        return [None if one is None else one.mul_(factor).to(dtype) for one in sums]


class _WeightGradient:
    """The sum of logits_grad.T @ rows over all chunks; it has the shape of the weight.

    A sum of many chunks in bfloat16 would stop growing: a term 256 times smaller than the sum is rounded away. So with
    more than one chunk, bfloat16 terms are summed in float32. The sum takes 4 bytes per element of the weight. The
    product of one chunk takes 2 more, because matrix kernels return the dtype of their inputs. After the last chunk the
    sum is rounded to bfloat16. float16 terms are always summed in float32, and the sum stays float32 until backward has
    scaled it.
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
        # Scale rows down by a power of two: a float16 product then stays below 16 times the largest element of `rows`.
        down = 2.0 ** max(0, (len(rows) - 1).bit_length() - 4) if self._is_half else 1.0
        torch.mm(logits_grad.T, rows / down if down > 1.0 else rows, out=self._part)
        self.total.add_(self._part, alpha=down)

    def settle(self) -> None:
        """Free the memory that backward does not need; rounds a bfloat16 sum. Must be called after the last chunk."""
        if self._part is not None and not self._is_half:
            self.total = self._part.copy_(self.total)
        self._part = None


def _chunks(counted: Tensor, bytes_per_row: int, logits_bytes: int) -> tuple[Tensor, ...]:
    """Split `counted` into the fewest parts of about equal size that take at most `logits_bytes` each."""
    num_counted = counted.numel()
    if not num_counted:
        return ()
    max_rows = max(1, logits_bytes // bytes_per_row)
    return counted.tensor_split(-(-num_counted // max_rows))


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses of inputs of `dtype` are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _cast_as_autocast_would(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands in the dtype that autocast uses for a linear layer; float64 stays float64.

    Autocast itself must not cast the weight: it caches cast weights. Inside the forward of an autograd function no
    graph is recorded, so the cached weight would have no graph. If the caller then used the same weight under autocast,
    the weight would get no gradient from that use.
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


@dataclasses.dataclass(frozen=True)
class FusedHead:
    """A linear head that can be fused with the model's loss."""

    tap: int  # the number of the tap that calls the head
    shift: bool  # whether the target of position i is label i + 1
    loss_function: Any = dataclasses.field(compare=False)  # the loss function whose result equals the fused loss


class _LogitsPlaceholder(torch.Tensor):
    """A fused head returns this tensor in place of the logits. Operations on it return ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return self, as the contiguous logits of a linear layer would.

        A copy would not be recognized when the loss function receives it.
        """
        return self


class HeadLoss:
    """The fused head and loss in one replay of the epilogue."""

    def __init__(self, head: FusedHead) -> None:
        self.head = head
        self._hidden: torch.Tensor | None = None
        self._module: nn.Linear | None = None
        self._logits: torch.Tensor | None = None

    def call_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Keep the head's input; returns a placeholder for the logits."""
        assert isinstance(module, nn.Linear)
        (self._hidden,) = args or tuple(kwargs.values())
        self._module = module
        outline = Outline(torch.Size([*self._hidden.shape[:-1], module.out_features]), self._hidden.dtype)
        self._logits = placeholder(outline, self._hidden.device).as_subclass(_LogitsPlaceholder)
        return self._logits

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments of a loss function contain the placeholder for the logits."""
        return self._logits is not None and (
            kwargs.get("logits") is self._logits or (bool(args) and args[0] is self._logits)
        )

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a call of `head.loss_function`, without computing the logits."""
        assert self._hidden is not None
        assert self._module is not None
        given = loss_arguments(args, kwargs)
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
        """Compute the logits and return the loss of `plain`, a function other than `head.loss_function`."""
        assert self._module is not None
        logits = self._module(self._hidden)

        def instead(value: Any) -> Any:
            return logits if value is self._logits else value

        return plain(*map(instead, args), **{name: instead(value) for name, value in kwargs.items()})

    def without_logits(self, returned: Any) -> Any:
        """Return the model's output with None in place of the logits."""
        return map_leaves(lambda leaf: None if leaf is self._logits else leaf, returned)


def loss_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a transformers loss function by name."""
    return {**dict(zip(("logits", "labels", "vocab_size"), args, strict=False)), **kwargs}


def are_large(hidden: torch.Tensor, module: nn.Module) -> bool:
    """Whether the logits of a linear head would take more memory than one chunk, LOGITS_BYTES."""
    num_rows = hidden.numel() // max(hidden.shape[-1], 1)
    return isinstance(module, nn.Linear) and num_rows * module.out_features * 8 > LOGITS_BYTES


def find_head(
    logits: torch.Tensor,
    loss: torch.Tensor,
    taps: list[tuple[nn.Module, torch.Tensor, torch.Tensor]],
    given: dict[str, Any],
    loss_function: Any,
) -> FusedHead | None:
    """Return the head whose output is `logits`, if the fused computation gives the same loss; else None.

    taps: (module, its first argument, its output), in the order of their calls. given: arguments of the loss function.
    """
    labels = given.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    for t, (module, hidden, output) in enumerate(taps):
        # Hooks of the head would not run in the fused computation.
        is_plain = type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks
        if output is logits and is_plain and labels.shape == logits.shape[:-1]:
            for shift in (True, False):
                fused = HeadLoss(FusedHead(t, shift, loss_function))
                if succeeds("the head is fused with the loss", partial(_gives, fused, module, hidden, given, loss)):
                    return fused.head
    return None


def _gives(fused: HeadLoss, module: nn.Module, hidden: torch.Tensor, given: dict[str, Any], loss: torch.Tensor) -> bool:
    """Whether the fused computation gives `loss`, up to rounding."""
    fused.call_head(module, (hidden,), {})
    with torch.no_grad():
        found = fused.loss((), given)
    return bool((found.double() - loss.double()).abs() <= _CLOSE * loss.double().abs())
