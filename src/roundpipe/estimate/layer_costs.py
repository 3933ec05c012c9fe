"""The cost of each layer of a model without weights, metered on the meta device, one block of each kind.

A `PaperModel` is a model on the meta device, cut into layers as wrapping cuts it: what runs before the first block, the
blocks, and what runs after the last block together with the loss. Knows no plan and no host memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from roundpipe.errors import ConfigError
from roundpipe.estimate.figures import DeviceFigures
from roundpipe.estimate.meter import GpuKernels, Meter
from roundpipe.plan import LayerCost
from roundpipe.split.discovery import block_paths
from roundpipe.split.head_loss import LOGITS_BYTES, LinearCrossEntropy

_IGNORED = -100  # label of positions that do not count
_LOGIT_BYTES = 8  # of a chunk of the head's loss, per row and class
_CHUNKS_RUN = 3  # chunks of the head's loss that run. A single one would do other work: it sums in another dtype
PASS_S = 1e-4  # host time of the runtime itself for one layer and pass of a microbatch


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """A model on the meta device, cut into layers.

    before, after: the parameters of the layer before the blocks and of the layer after them. A parameter that both use
    (a tied head) is in both.
    loss: returns the loss of (number of sequences, their length) after a forward that runs the given blocks only, on
        the given meter.
    unseen: those parameters of `before` that the loss does not use, because they see images.
    """

    model: nn.Module
    before: Sequence[nn.Parameter]
    blocks: Sequence[nn.Module]
    after: Sequence[nn.Parameter]
    loss: Callable[[int, int, Sequence[nn.Module], Meter], Tensor]
    unseen: Sequence[nn.Parameter] = ()

    @property
    def layers(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer."""
        return [list(self.before), *(list(block.parameters()) for block in self.blocks), list(self.after)]

    def trained_at_home(self) -> list[list[nn.Parameter]]:
        """The trained parameters of each layer. A parameter that several layers use is updated with the first one."""
        seen: set[int] = set()
        homes: list[list[nn.Parameter]] = []
        for parameters in self.layers:
            homes.append([param for param in parameters if param.requires_grad and id(param) not in seen])
            seen.update(map(id, homes[-1]))
        return homes


def sequential_on_paper(model: nn.Sequential, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> PaperModel:
    """A language model that is an nn.Sequential: embedding, blocks, head. `loss_fn` gets logits and labels."""
    first, *blocks, last = model

    def loss(num_sequences: int, length: int, chosen: Sequence[nn.Module], meter: Meter) -> Tensor:
        ids = torch.empty(num_sequences, length, dtype=torch.int64, device="meta")
        hidden = first(ids)
        for block in chosen:
            hidden = block(hidden)
        return loss_fn(last(hidden), ids)

    return PaperModel(model, list(first.parameters()), blocks, list(last.parameters()), loss)


def causal_lm_on_paper(model: Any) -> PaperModel:
    """A causal language model of transformers that was made on the meta device, alone or with parts that see images.

    Assumes that head and loss can be fused, as wrapping does when calibration finds that they can. Parts that see
    images are parameters before the blocks; they do not run.
    """
    paths, body = _text_blocks(model)
    container = model.get_submodule(paths[0].rpartition(".")[0])
    blocks = [model.get_submodule(path) for path in paths]
    inside = {id(param) for block in blocks for param in block.parameters()}
    head = model.get_output_embeddings()
    of_text = {id(param) for part in (body, head) for param in part.parameters()}
    sees_images = model.config.get_text_config() is not model.config
    unseen = [param for param in model.parameters() if sees_images and id(param) not in of_text]
    before = [*model.get_input_embeddings().parameters(), *unseen]
    own = {id(param) for param in before}
    outside = [param for param in model.parameters() if id(param) not in inside | own]
    tied = [param for param in head.parameters() if id(param) in own]

    def loss(num_sequences: int, length: int, chosen: Sequence[nn.Module], meter: Meter) -> Tensor:
        ids = torch.empty(num_sequences, length, dtype=torch.int64, device="meta")
        all_blocks = dict(container._modules)
        container._modules.clear()
        container._modules.update({str(number): block for number, block in enumerate(chosen)})
        try:
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            container._modules.clear()
            container._modules.update(all_blocks)
        return _head_loss(hidden.flatten(0, 1), head, ids.flatten(), meter)

    return PaperModel(model, before, blocks, [*outside, *tied], loss, unseen)


def _head_loss(rows: Tensor, head: Any, targets: Tensor, meter: Meter) -> Tensor:
    """The loss of the head, which is computed in chunks of rows.

    Long sequences have thousands of chunks, which all take the same time and memory. So only a few of them run here.
    """
    largest_chunk = max(1, LOGITS_BYTES // (_LOGIT_BYTES * head.weight.shape[0]))
    num_rows = rows.shape[0]
    num_chunks = math.ceil(num_rows / largest_chunk)

    def of_chunks(count: int) -> Tensor:
        with meter.finding_at_most(math.ceil(num_rows * count / num_chunks)):
            # `linear_cross_entropy` asks autocast, which does not know the meta device.
            loss: Tensor = LinearCrossEntropy.apply(
                rows, head.weight, getattr(head, "bias", None), targets, None, _IGNORED, LOGITS_BYTES, True
            )
        return loss

    if num_chunks <= _CHUNKS_RUN:
        return of_chunks(num_chunks)
    loss = of_chunks(_CHUNKS_RUN)
    fewer, more = (meter.seconds_of(partial(of_chunks, count)) for count in (_CHUNKS_RUN - 1, _CHUNKS_RUN))
    meter.device_s += (num_chunks - _CHUNKS_RUN) * (more[0] - fewer[0])
    meter.launch_s += (num_chunks - _CHUNKS_RUN) * (more[1] - fewer[1])
    return loss


def _text_blocks(model: Any) -> tuple[list[str], nn.Module]:
    """The paths of the blocks that process text, in their order, and the module that runs them."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    found = [f"{prefix}.{path}".lstrip(".") for path in block_paths(decoder)]
    parents = {path.rpartition(".")[0] for path in found}
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} has no head that computes logits of tokens; an estimate needs one.")
    if len(parents) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(parents)} lists of blocks; an estimate needs a model with one, as causal "
            "language models have."
        )
    parent = parents.pop()
    # Some models are their own decoder; then the module with the list of blocks takes the tokens.
    body = model.get_submodule(parent.rpartition(".")[0]) if decoder is model else decoder
    return sorted(found, key=lambda path: [int(p) if p.isdigit() else p for p in path.split(".")]), body


class _AdaptedLinear(nn.Module):
    """A frozen linear layer with a LoRA adapter; the operations are those of peft without dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=weight.dtype)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.base(values) + self.up(self.down(values)) * 2.0
        return result


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a language model on the meta device and give every linear layer of its blocks a LoRA adapter."""
    model.requires_grad_(False)
    for path in _text_blocks(model)[0]:
        block = model.get_submodule(path)
        for name, linear in list(block.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, attribute = name.rpartition(".")
                setattr(block.get_submodule(parent), attribute, _AdaptedLinear(linear, rank))


def layer_costs(paper: PaperModel, figures: DeviceFigures, num_sequences: int, length: int) -> tuple[LayerCost, ...]:
    """The costs of all layers for a microbatch of `num_sequences` sequences of `length` tokens."""
    # The first block is a kind by itself: behind a frozen embedding, it computes no gradient of its input.
    kinds = [(number == 0, _kind(block)) for number, block in enumerate(paper.blocks)]
    chosen = dict(reversed(list(zip(kinds, paper.blocks, strict=True))))  # the first block of each kind
    meter = Meter(figures)
    watch = _Watch(meter)
    handles = [handle for block in chosen.values() for handle in watch.attach(block)]
    try:
        with torch.enable_grad(), meter, GpuKernels(meter):
            # In the order of the model: a block gets the output of the block before it.
            in_order = [block for block in paper.blocks if any(block is one for one in chosen.values())]
            loss = paper.loss(num_sequences, length, in_order, meter)
            watch.forward_ended()
            loss.backward()
            watch.backward_ended()
    except Exception as error:  # of the model's code, which runs without values here
        name, reason = type(paper.model).__name__, " ".join(str(error).split())
        raise ConfigError(f"a step of {name} with {length} tokens cannot be estimated: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
        for param in paper.model.parameters():
            param.grad = None
    of_kind = {kind: watch.block(block) for kind, block in chosen.items()}
    costs = [watch.before(), *(of_kind[kind] for kind in kinds), watch.after()]
    return tuple(_sized(cost, parameters) for cost, parameters in zip(costs, paper.layers, strict=True))


def _kind(block: nn.Module) -> Hashable:
    """A key that equal blocks share: the classes, settings and parameter shapes of all their modules."""
    return tuple(
        (
            type(module),
            tuple(
                (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False)
            ),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, int | float | str | None) and not name.endswith("idx")  # the block's own number
            ),
        )
        for module in block.modules()
    )


def _sized(cost: LayerCost, parameters: Sequence[nn.Parameter]) -> LayerCost:
    return dataclasses.replace(
        cost,
        weight_bytes=sum(param.nbytes for param in parameters),
        grad_bytes=sum(param.nbytes for param in parameters if param.requires_grad),
    )


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What the meter shows at one moment."""

    device_s: float
    launch_s: float
    live_bytes: int

    def seconds_since(self, earlier: _Reading) -> float:
        """Seconds of a layer's pass: the device computes while the host launches ahead."""
        launch_s = self.launch_s - earlier.launch_s
        return max(self.device_s - earlier.device_s, launch_s + PASS_S if launch_s else 0.0)


class _Watch:
    """Reads the meter where forward and backward pass from layer to layer."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._order: list[nn.Module] = []  # the blocks that ran
        self._input_bytes: dict[nn.Module, int] = {}
        # By block: when forward enters and leaves it, and when backward has computed the gradient of its output and of
        # its input. Backward may never compute the latter.
        self._entered: dict[nn.Module, _Reading] = {}
        self._left: dict[nn.Module, _Reading] = {}
        self._output_grad: dict[nn.Module, _Reading] = {}
        self._input_grad: dict[nn.Module, _Reading] = {}
        self._start = self._forward_end = self._backward_end = self._now()
        self._loss_bytes = 0  # peak after the last block, until backward reaches that block

    def attach(self, block: nn.Module) -> list[RemovableHandle]:
        return [
            block.register_forward_pre_hook(self._enter, with_kwargs=True),
            block.register_forward_hook(self._leave),
        ]

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = _tensors((args, kwargs))
        self._order.append(block)
        self._input_bytes[block] = sum(tensor.nbytes for tensor in tensors)
        self._entered[block] = self._now()
        _when_computed(tensors, lambda: self._input_grad.setdefault(block, self._now()))

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._left[block] = self._now()
        self._meter.peak_bytes = self._meter.live_bytes
        _when_computed(_tensors(output), lambda: self._reach_output(block))

    def _reach_output(self, block: nn.Module) -> None:
        self._output_grad.setdefault(block, self._now())
        if block is self._order[-1]:
            self._loss_bytes = self._meter.peak_bytes - self._left[block].live_bytes

    def _now(self) -> _Reading:
        return _Reading(self._meter.device_s, self._meter.launch_s, self._meter.live_bytes)

    def forward_ended(self) -> None:
        self._forward_end = self._now()

    def backward_ended(self) -> None:
        self._backward_end = self._now()
        if not self._order or self._order[-1] not in self._output_grad:
            raise ConfigError("no parameter before the model's head is trained; train some of them, or use LoRA.")

    def block(self, block: nn.Module) -> LayerCost:
        """The cost of a block that ran."""
        entered, left = self._entered[block], self._left[block]
        end = self._input_grad.get(block, self._backward_end)
        backward_s = end.seconds_since(self._output_grad.get(block, self._backward_end))
        return _cost(
            left.seconds_since(entered), backward_s, left.live_bytes - entered.live_bytes, self._input_bytes[block]
        )

    def before(self) -> LayerCost:
        """The cost of the layer before the blocks."""
        entered = self._entered[self._order[0]]
        backward_s = self._backward_end.seconds_since(self._input_grad.get(self._order[0], self._backward_end))
        return _cost(entered.seconds_since(self._start), backward_s, entered.live_bytes, 0)

    def after(self) -> LayerCost:
        """The cost of the layer after the blocks. Its activations include the loss at its peak, as if measured."""
        last = self._order[-1]
        forward_s = self._forward_end.seconds_since(self._left[last])
        backward_s = self._output_grad[last].seconds_since(self._forward_end)
        return _cost(forward_s, backward_s, self._loss_bytes, self._input_bytes[last])


def _cost(forward_s: float, backward_s: float, activation_bytes: int, input_bytes: int) -> LayerCost:
    return LayerCost(forward_s, forward_s, backward_s, activation_bytes=activation_bytes, input_bytes=input_bytes)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _when_computed(tensors: Sequence[Tensor], act: Callable[[], object]) -> None:
    """Call `act` when backward has computed the gradient of the first tensor that needs one."""
    first = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if first is not None:
        first.register_hook(lambda _: act() and None)
