"""Plain PyTorch doing what RoundPipe promises, one microbatch after the other: what the parity suite compares with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from roundpipe import RoundPipe, RoundPipeRunConfig

DEVICE_COUNTS = (1, 2, 3, 5, 8)
WAIT_S = 30.0  # for events that must come; a test that needs longer is stuck

LossFn = Callable[[Any, Any], Any]


def mse(output: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, label)


def total(output: Tensor, label: Any) -> Tensor:
    """A loss that needs no label and gives every output element a different gradient."""
    return (output * torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()).sum()


def clip_in_double(params: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """torch's clipping, but with a 2-norm that is added up in double precision.

    clip_grad_norm_ promises this where gradients land in half precision. torch adds up in float32.
    """
    if norm_type != 2.0:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    gradients = [param.grad for param in params if param.grad is not None]
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def microbatches(num_microbatch: int) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=num_microbatch)


def mlp(num_layers: int = 4, width: int = 5) -> nn.Sequential:
    """Layers of two modules each, so that a layer is not a leaf module."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)])


def batch(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()


# The reference.


def split(value: Any, num_microbatch: int) -> list[Any]:
    """Tensors cut along dim 0, everything else given to each microbatch."""
    leaves, spec = tree_flatten(value)
    pieces = [
        leaf.tensor_split(num_microbatch) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * num_microbatch
        for leaf in leaves
    ]
    return [tree_unflatten([piece[j] for piece in pieces], spec) for j in range(num_microbatch)]


def merge(outputs: Sequence[Any]) -> Any:
    """Tensors put together along dim 0, 0-dim ones averaged, everything else from the first microbatch."""
    flat = [tree_flatten(output) for output in outputs]

    def merge_leaf(values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        return torch.cat(list(values)) if values[0].dim() else torch.stack(list(values)).mean(0)

    return tree_unflatten([merge_leaf(leaves) for leaves in zip(*[f[0] for f in flat], strict=True)], flat[0][1])


def run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first layer gets all arguments, every other one the output of the layer before it."""
    if not isinstance(module, nn.Sequential):
        return module(*args, **kwargs)
    first, *others = module
    value = first(*args, **kwargs)
    for layer in others:
        value = layer(value)
    return value


@dataclass
class Outcome:
    """What one call of the reference returned."""

    loss: Any
    outputs: Any


def call_reference(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    label: Any = None,
    loss_fn: LossFn = mse,
    num_microbatch: int = 4,
) -> Outcome:
    """The loop of the documents; gradients microbatch by microbatch, then the call's sum onto the sum so far."""
    before = take_grads(module)
    losses, outputs = [], []
    pieces = zip(
        split((args, kwargs or {}), num_microbatch),
        split(label, num_microbatch),
        strict=True,
    )
    for (args_mb, kwargs_mb), label_mb in pieces:
        output = run_module(module, args_mb, kwargs_mb)
        loss = loss_fn(output, label_mb)
        torch.autograd.backward(loss)
        losses.append(tree_map(torch.Tensor.detach, loss))
        outputs.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output))
    add_grads(module, before)
    return Outcome(_sum_losses(losses), merge(outputs))


class PendingForward:
    """A forward cut behind the module: `output` is what the user gets, `backward()` goes on where it was cut."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> None:
        self._module = module
        pieces = [tree_map(_own, piece) for piece in split((args, kwargs), num_microbatch)]
        self._made = [run_module(module, args, kwargs) for args, kwargs in pieces]
        self._cut = [tree_map(_cut, made) for made in self._made]
        self.output = merge(self._cut)

    def backward(self) -> None:
        """Microbatch by microbatch, in their order, then the sum onto the sum so far."""
        before = take_grads(self._module)
        for made, cut in zip(self._made, self._cut, strict=True):
            pairs = [
                (output, leaf.grad)
                for output, leaf in zip(tree_flatten(made)[0], tree_flatten(cut)[0], strict=True)
                if isinstance(leaf, Tensor) and leaf.grad is not None
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        add_grads(self._module, before)


def _own(leaf: Any) -> Any:
    """Microbatches must not feel what a layer of another one does to its input; strides and offset stay."""
    return copy.deepcopy(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def _cut(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _sum_losses(losses: Sequence[Any]) -> Any:
    if isinstance(losses[0], Tensor):
        return _sum(losses)
    return [_sum(parts) for parts in zip(*losses, strict=True)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result + tensor
    return result


def take_grads(module: nn.Module) -> dict[str, Tensor | None]:
    taken = {}
    for name, param in module.named_parameters():
        taken[name], param.grad = param.grad, None
    return taken


def add_grads(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """What was gathered before, with the present gradients added to it."""
    for name, param in module.named_parameters():
        earlier = before[name]
        if earlier is not None:
            param.grad = earlier if param.grad is None else earlier.add_(param.grad)


@dataclass
class StalenessReference:
    """Training with weights exactly one step old: calls read `module`, the optimizer updates `masters`.

    `versions[n]` are the weights after n updates. A call after an async step n reads version n - 1, after a sync step n
    or a synchronize() version n.
    """

    module: nn.Module
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    optim_dtype: torch.dtype | None = None
    run_step: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.step()
    masters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().clone().to(self.optim_dtype or p.dtype)) for p in self.trainable]
        self.optimizer = self.make_optimizer(self.masters)
        self.versions = [self._snapshot()]

    def step(self, is_async: bool) -> None:
        for master, param in zip(self.masters, self.trainable, strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
            param.grad = None
        self.run_step(self.optimizer)
        self.optimizer.zero_grad()
        self.versions.append(self._snapshot())
        self._show(len(self.versions) - (2 if is_async else 1))

    def synchronize(self) -> None:
        self._show(len(self.versions) - 1)

    def _snapshot(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    def _show(self, version: int) -> None:
        with torch.no_grad():
            for param, weights in zip(self.trainable, self.versions[version], strict=True):
                param.copy_(weights)


# Comparing.


def assert_same(ours: Any, reference: Any, where: str = "") -> None:
    """Equal to the last bit, in structure, dtype and shape."""
    our_leaves, our_spec = tree_flatten(ours)
    leaves, spec = tree_flatten(reference)
    assert our_spec == spec, f"{where}: {our_spec} instead of {spec}"
    for position, (one, other) in enumerate(zip(our_leaves, leaves, strict=True)):
        if not isinstance(other, Tensor):
            assert one == other, f"{where}, leaf {position}"
            continue
        assert isinstance(one, Tensor), f"{where}, leaf {position}: {type(one)}"
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{where}, leaf {position}"
        assert torch.equal(one, other), f"{where}, leaf {position} differs by {(one - other).abs().max()}"


def assert_same_grads(ours: nn.Module, reference: nn.Module) -> None:
    """Both modules have the same gradients; None in the one is None in the other."""
    for (name, param), (_, other) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert_same(param.grad, other.grad, f"gradient of {name}")


def assert_same_state(ours: nn.Module, reference: nn.Module) -> None:
    """Weights and buffers."""
    assert_same(dict(ours.state_dict()), dict(reference.state_dict()), "state_dict")


class Models:
    """Wraps modules and closes what it has wrapped."""

    def __init__(self) -> None:
        self._open: list[RoundPipe] = []

    def wrap(self, module: nn.Module, num_devices: int, **kwargs: Any) -> RoundPipe:
        model = RoundPipe(module, devices=["cpu"] * num_devices, **kwargs)
        self._open.append(model)
        return model

    def wrap_copy(self, module: nn.Module, num_devices: int, **kwargs: Any) -> RoundPipe:
        return self.wrap(copy.deepcopy(module), num_devices, **kwargs)

    def close(self) -> None:
        for model in reversed(self._open):
            model.close()
        self._open.clear()


def check_fused(
    models: Models,
    module: nn.Module,
    num_devices: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    label: Any = None,
    loss_fn: LossFn = mse,
    num_microbatch: int = 3,
    num_calls: int = 2,
    **wrap_options: Any,
) -> RoundPipe:
    """Losses, outputs, gradients, buffers and weights of fused calls are those of the reference, to the last bit."""
    reference = copy.deepcopy(module)
    model = models.wrap_copy(module, num_devices, **wrap_options)
    for _ in range(num_calls):
        expected = call_reference(reference, *copy.deepcopy((args, kwargs, label)), loss_fn, num_microbatch)
        loss, outputs = model.forward_backward(
            args, kwargs or {}, label, loss_fn, return_outputs=True, run_config=microbatches(num_microbatch)
        )
        assert_same(loss, expected.loss, "loss")
        assert_same(tree_map(_detached, outputs), expected.outputs, "outputs")
    model.synchronize()
    assert_same_grads(model.model, reference)
    assert_same_state(model.model, reference)
    return model


def check_forward(
    models: Models,
    module: nn.Module,
    num_devices: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    loss_of: Callable[[Any], Tensor] = lambda output: total(output, None),
    num_microbatch: int = 3,
    **wrap_options: Any,
) -> RoundPipe:
    """forward() and backward() give the outputs and gradients of the plain module run on each microbatch alone."""
    reference = copy.deepcopy(module)
    model = models.wrap_copy(module, num_devices, **wrap_options)
    expected = PendingForward(reference, args, kwargs or {}, num_microbatch)
    output = model(*args, **(kwargs or {}), roundpipe_run_config=microbatches(num_microbatch))
    assert_same(tree_map(_detached, output), tree_map(_detached, expected.output), "outputs")
    loss_of(expected.output).backward()
    expected.backward()
    loss_of(output).backward()
    model.synchronize()
    assert_same_grads(model.model, reference)
    assert_same_state(model.model, reference)
    return model


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def grads_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
