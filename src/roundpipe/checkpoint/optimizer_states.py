"""The states of optimizers in checkpoints: whether they fit an optimizer, and reading them into its memory.

Knows rules and forms; reads files through a Reader. What was saved in another form than that of the optimizer's group
is converted, one parameter after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe.checkpoint.contents import STATE
from roundpipe.checkpoint.format import DTYPE_OF, TensorEntry
from roundpipe.checkpoint.ranges import read_own_range
from roundpipe.checkpoint.verified import Reader
from roundpipe.errors import CheckpointError
from roundpipe.optim.one_pass import divides_moments
from roundpipe.optim.rules import rule_of
from roundpipe.optim.states import Conversions, first_element, moment_count, new_memory, state_placement, zeros_like
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import elements_per_entry, missing_part, part_dtypes, part_shape

Tensors = Mapping[str, TensorEntry]
Params = Mapping[str, torch.Tensor]  # the parameters of an optimizer by name


def _parts(tensors: Tensors) -> dict[str, list[tuple[str, TensorEntry]]]:
    """The tensors of each parameter's state, with their keys in the state, by name of the parameter."""
    found: dict[str, list[tuple[str, TensorEntry]]] = {}
    for name, entry in tensors.items():
        if name.startswith(STATE):
            key, _, owner = name.removeprefix(STATE).partition("/")
            found.setdefault(owner, []).append((key, entry))
    return found


def check_states(tensors: Tensors, optimizer: torch.optim.Optimizer, params: Params, path: Path) -> int:
    """Raise CheckpointError if the states in the checkpoint at `path` do not fit. Returns the bytes to allocate."""
    rule, ranged, needed = rule_of(optimizer), ranged_masters(optimizer), 0
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for owner, parts in _parts(tensors).items():
        param, keys = params.get(owner), {key for key, _ in parts}
        if param is None:
            name = f"{STATE}{parts[0][0]}/{owner}"
            raise CheckpointError(f"{path} has {name!r}, but the optimizer has no such parameter.")
        if rule is None:
            needed += 0 if optimizer.state.get(param) else sum(entry.num_bytes for _, entry in parts)
            continue
        for key, entry in parts:
            dtypes = part_dtypes(key, param.dtype, rule.squares)
            if entry.shape != part_shape(key, tuple(param.shape)) or DTYPE_OF.get(entry.dtype) not in dtypes:
                raise CheckpointError(
                    f"{STATE + key + '/' + owner!r} has shape {list(entry.shape)} and dtype {DTYPE_OF[entry.dtype]} in "
                    f"{path}, the parameter has {list(param.shape)} and {param.dtype}."
                )
            if (other := missing_part(key)) not in (None, *keys):
                raise CheckpointError(f"{path} has {key!r} of {owner!r} without {other!r}, its other part.")
        if not optimizer.state.get(param):
            count = moment_count(param) if id(param) in ranged else param.numel()
            forms = rule.forms(groups[id(param)], param)
            needed += sum(form.num_bytes(count, param.dtype) for form in forms.values())
    return needed


def read_states(reader: Reader, tensors: Tensors, optimizer: torch.optim.Optimizer, params: Params, path: Path) -> None:
    """Read all states into the optimizer, in the forms of its groups."""
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    rule, ranged, conversions = rule_of(optimizer), ranged_masters(optimizer), Conversions()
    with state_placement(optimizer):
        for owner, parts in _parts(tensors).items():
            param = params[owner]
            for key, entry in parts:
                _read_part(reader, optimizer.state[param], key, entry, param, is_ranged=id(param) in ranged)
            if rule is not None:
                conversions.convert(rule, groups[id(param)], param, optimizer.state[param])
    conversions.log(str(path))


def ranged_masters(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the masters of whose moments this machine has one range."""
    return {
        id(param)
        for group in optimizer.param_groups
        if divides_moments(optimizer, group)
        for param in group["params"]
        if isinstance(param, OptimizerCopy) and param.share is not None
    }


def _read_part(
    reader: Reader, state: dict[str, Any], key: str, entry: TensorEntry, param: torch.Tensor, *, is_ranged: bool
) -> None:
    """Read one tensor of a parameter's state, or this machine's range of it, into memory that fits."""
    old, dtype, per_entry = state.get(key), DTYPE_OF[entry.dtype], elements_per_entry(key)
    in_order = param.is_contiguous() or missing_part(key) is None  # blocks follow row-major order
    is_ranged = is_ranged and in_order and entry.shape == part_shape(key, tuple(param.shape))
    if is_ranged and isinstance(param, OptimizerCopy):
        assert param.share is not None
        count = -(-moment_count(param) // per_entry)
        if not isinstance(old, torch.Tensor) or old.shape != (count,) or old.dtype is not dtype:
            old = state[key] = new_memory(count, dtype)
        with torch._C.DisableTorchFunctionSubclass():
            if per_entry == 1:
                read_own_range(reader, entry, param, param.share, old)
            elif count:
                reader.read_range(entry, first_element(param) // per_entry, old)
        return
    if not isinstance(old, torch.Tensor) or old.shape != entry.shape or old.dtype is not dtype:
        old = state[key] = _memory_for(entry, param)
    reader.read_into(entry, old)


def forget_missing(
    state: dict[str, Any], name: str, tensors: Mapping[str, TensorEntry], numbers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Remove entries of a parameter's state that the checkpoint does not have."""
    for key in list(state):
        if f"{STATE}{key}/{name}" not in tensors and key not in numbers.get(name, {}):
            del state[key]


def _memory_for(entry: TensorEntry, param: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of an optimizer's state: laid out as its parameter if it has the same shape."""
    dtype = DTYPE_OF[entry.dtype]
    if entry.shape == tuple(param.shape) and dtype == param.dtype and param.device.type == "cpu":
        return zeros_like(param)
    if param.device.type == "cpu":
        return new_memory(math.prod(entry.shape), dtype).view(entry.shape)
    return torch.empty(entry.shape, dtype=dtype, device=param.device)
