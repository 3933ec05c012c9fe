"""Plain PyTorch behind the names of RoundPipe that the examples use: the same script then runs as a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import roundpipe
from roundpipe import RoundPipePackedData, RoundPipeRunConfig


def put_plain_pytorch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the names that examples import from roundpipe. Checkpoints are neither written nor found."""
    saved = SimpleNamespace(wait=lambda: None)
    checkpoint = SimpleNamespace(latest=lambda folder: None, save=lambda *args, **kwargs: saved)
    for name, plain in {
        "RoundPipe": PlainModel,
        "wrap_model_to_roundpipe": PlainModel,
        "checkpoint": checkpoint,
        "optim": torch.optim,
        "clip_grad_norm_": lambda model, max_norm: nn.utils.clip_grad_norm_(model.optim_parameters(), max_norm),
    }.items():
        monkeypatch.setattr(roundpipe, name, plain)


class PlainModel:
    """Has the methods of a RoundPipe that examples call. Runs the network on the CPU, with losses by microbatch."""

    def __init__(self, network: nn.Module, *, model_run_config: Any = RoundPipeRunConfig(), **_: Any) -> None:
        self._network, self._config = network, model_run_config

    def __enter__(self) -> PlainModel:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:  # eval, train, state_dict, generate
        return getattr(self._network, name)

    def __call__(self, *args: Any, roundpipe_run_config: Any = RoundPipeRunConfig(), **kwargs: Any) -> Any:
        if roundpipe_run_config.merge_output is not False:
            return self._network(*args, **kwargs)
        losses = [self._network(**part).loss for part in _split(kwargs, roundpipe_run_config.num_microbatch)]
        return SimpleNamespace(loss=RoundPipePackedData(losses, [None] * len(losses)))

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] = {},
        label: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        return_outputs: bool = False,
        run_config: Any = None,
    ) -> Any:
        if loss_fn is None:  # the model computes the mean over the labels of the whole batch
            loss = self._network(**input_kwargs).loss
            loss.backward()
            return loss.detach()
        config = run_config or self._config
        count = 1 if config.split_input else config.num_microbatch  # whole batches prove that splits are right
        losses, outputs = [], None
        for args, kwargs, labels in _split((input_args, input_kwargs, label), count):
            outputs = self._network(*args, **kwargs)
            rows, all_rows = len(pytree.tree_leaves(labels)[0]), len(pytree.tree_leaves(label)[0])
            losses.append(loss_fn(outputs, labels) * rows / all_rows)
            losses[-1].backward()
        loss = torch.stack(losses).sum().detach()
        return (loss, outputs) if return_outputs else loss

    def step(self, step_fn: Callable[[], object], is_async: bool = True) -> None:
        assert not is_async, "a plain loop has exact steps only"
        step_fn()

    def optim_parameters(self) -> list[nn.Parameter]:
        return [param for param in self._network.parameters() if param.requires_grad]

    def stats(self) -> Any:
        return SimpleNamespace(tokens_per_s=0.0)

    def close(self) -> None:
        pass


def _split(value: Any, count: int) -> Sequence[Any]:
    """Return one nested value per microbatch; tensors are split along their first dimension."""
    if count == 1:
        return [value]
    leaves, structure = pytree.tree_flatten(value)
    columns = [leaf.tensor_split(count) for leaf in leaves]
    return [pytree.tree_unflatten([column[index] for column in columns], structure) for index in range(count)]
