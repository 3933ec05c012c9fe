"""Low bits without the kernel: states made from states in other forms, and updates by the plain optimizer.

Knows forms and rules, neither layers nor files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe.optim.rules import Group, Rule
from roundpipe.optim.state_memory import first_element, moment_count, new_parts
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import Form, is_low_part, seed_of, stored_form

logger = logging.getLogger("roundpipe")

State = dict[str, Any]


def parts_of(state: Mapping[str, Any], forms: Mapping[str, Form]) -> list[list[Any]]:
    """The parts of each state of a parameter; None where a part is missing."""
    return [[state.get(part) for part in form.part_names(name)] for name, form in forms.items()]


def state_fits(param: Tensor, state: Mapping[str, Any], forms: Mapping[str, Form], *, is_divided: bool) -> bool:
    """Whether a state has all parts of its forms, whole, or the range of this machine if states are divided."""
    shapes = [tuple(param.shape), *([(moment_count(param),)] if is_divided else [])]
    found = list(zip(forms.values(), parts_of(state, forms), strict=True))
    return any(all(form.fits(parts, shape, param.dtype) for form, parts in found) for shape in shapes)


# Conversion.


class Conversions:
    """Brings states that were stored in other forms into those of an optimizer, and says so in one line."""

    def __init__(self) -> None:
        self._done: Counter[tuple[str, str]] = Counter()

    def convert(self, rule: Rule, group: Group, param: Tensor, state: State) -> None:
        """Bring the states of one parameter, whole or this machine's range, into the forms of its group."""
        for index, (name, form) in enumerate(rule.forms(group, param).items()):
            old = stored_form(state, name, param.dtype, is_square=name in rule.squares)
            if old is None or old is form:
                continue
            stored = [state.pop(part) for part in old.part_names(name)]
            values = old.expanded(stored).to(param.dtype)
            is_range = values.shape != param.shape
            parts = new_parts(form, param) if is_range or not _is_divided(param) else _whole_parts(form, param)
            step = int(state["step"]) if "step" in state else 0
            form.pack(values, parts, seed_of(step, index), first_element(param) if is_range else 0)
            state.update(zip(form.part_names(name), parts, strict=True))
            self._done[old.name, form.name] += 1
        if rule.counts_steps(group, param):
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        elif not rule.has_step_count:
            state.pop("step", None)

    def log(self, kind: str) -> None:
        """Log what was converted, if anything was."""
        for (old, new), count in self._done.items():
            logger.warning("%s: %d loaded states were converted from %s to %s moments.", kind, count, old, new)


def _is_divided(param: Tensor) -> bool:
    return moment_count(param) != param.numel()


def _whole_parts(form: Form, param: Tensor) -> list[Tensor]:
    """The parts of a state of zeros of the whole parameter, although several machines divide it."""
    return new_parts(form, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device))


def convert_all(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Bring all states of an optimizer into the forms of its groups."""
    conversions = Conversions()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state.get(param):
                conversions.convert(rule, group, param, optimizer.state[param])
    conversions.log(type(optimizer).__name__)


def restore_parts(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], moments: Sequence[str | None], rule: Rule
) -> None:
    """Undo what torch's `load_state_dict` does to low-bit states: it casts parts to the dtype of the parameter.

    `saved`: the state dict; `moments`: the option of each group before it was loaded, which stays.
    """
    ids = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(ids, params, strict=True):
        state = optimizer.state.get(param, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and is_low_part(key, value.dtype, param.dtype):
                state[key] = value.to(param.device, copy=True)
    for group, option in zip(optimizer.param_groups, moments, strict=True):
        group.pop("moments", None)
        if option is not None:
            group["moments"] = option
    convert_all(optimizer, rule)


# Updates without the kernel.


def update_expanded(
    optimizer: torch.optim.Optimizer, rule: Rule, group: Group, param: Tensor, plain_step: Callable[[], Any]
) -> None:
    """Update one parameter by `plain_step`, which works on float32 states: expands them, and packs them afterwards."""
    forms = rule.forms(group, param)
    old: State = optimizer.state.get(param) or {}
    if old:
        if not state_fits(param, old, forms, is_divided=False):
            raise RuntimeError(
                f"{type(optimizer).__name__} has a state that does not fit moments={group['moments']!r} of a parameter "
                f"of shape {list(param.shape)}: it has {', '.join(old)}. Load states with load_state_dict or "
                "roundpipe.checkpoint.load, which convert them."
            )
        found = zip(forms.items(), parts_of(old, forms), strict=True)
        expanded = {name: form.expanded(parts) for (name, form), parts in found}
        optimizer.state[param] = {**({"step": old["step"].clone()} if rule.has_step_count else {}), **expanded}
    try:
        plain_step()
    except BaseException:
        if old:
            optimizer.state[param] = old
        else:
            optimizer.state.pop(param, None)
        raise
    new = optimizer.state.get(param)
    if not new:
        return
    before = int(old["step"]) if old else 0
    step = int(new["step"]) if rule.has_step_count else before + 1
    if old and step == before:  # a GradScaler has skipped the step
        optimizer.state[param] = old
        return
    made: State = {"step": torch.tensor(float(step))}
    for index, (name, form) in enumerate(forms.items()):
        parts = [old[part] for part in form.part_names(name)] if old else _whole_parts(form, param)
        form.pack(new[name], parts, seed_of(step, index))
        made.update(zip(form.part_names(name), parts, strict=True))
    optimizer.state[param] = made


def round_masters(params: Iterable[Tensor]) -> None:
    """Round the masters of 24 bits that the plain optimizer has updated, as the kernel rounds those that it updates."""
    for param in params:
        if isinstance(param, OptimizerCopy) and param.has_own_gradient:
            param.round_update()
