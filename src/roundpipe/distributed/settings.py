"""Settings that must be equal on all machines: a checksum that travels with headers, and what differs between machines.

Knows values and their names, and what an optimizer consists of; sends nothing.

[Note: equal settings] Machines add their gradients and divide the update between them. So one with another learning
rate, another order of parameters or another weight of its losses would spoil the weights of all, in silence. Therefore
the headers of calls and steps carry a checksum of the settings that decide numbers: which parameters require grad; how
losses are weighed; class, parameters and options of the optimizer; the scale of losses, and the limit of norms. Where
checksums differ, all machines see it in the same slot. They exchange the values, and raise MachineError with the names,
values and ranks, before anything is updated. Options that change no number may differ: devices, microbatches, plans.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from operator import is_
from typing import Any

import torch

from roundpipe.store import LayerStore, ParameterRecord

_MOST_NAMED = 5  # settings that an error names at most
_PLAIN = {type(None), bool, int, float, str, torch.dtype}
_MOST_VALUES = 16  # larger tensors among the options of an optimizer are not compared


class Settings:
    """Values by name that must be equal on all machines: see [Note: equal settings]."""

    def __init__(self, digest: str, values: Callable[[], Mapping[str, str]]) -> None:
        """`digest`: equal on two machines if their values are. `values`: called only where digests differ."""
        self.digest, self.values = digest, values

    @classmethod
    def of(cls, values: Mapping[str, object], params: Sequence[str] = ()) -> Settings:
        """`params`: the names of the parameters that the values concern, in order."""
        texts = {name: _shown(value) for name, value in values.items()}
        digest = _digest([*(f"{name}={text}" for name, text in texts.items()), *params])
        return cls(digest, lambda: {**texts, **_numbered(params)})

    @classmethod
    def of_flags(cls, records: Sequence[ParameterRecord]) -> Settings:
        """Which parameters require grad."""
        flags = bytes(record.param.requires_grad for record in records)

        def values() -> Mapping[str, str]:
            return {f"requires_grad of {r.name}": str(bool(f)) for r, f in zip(records, flags, strict=True)}

        return cls(hashlib.blake2b(flags, digest_size=8).hexdigest(), values)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _shown(value: object) -> str:
    """A text that is equal for equal values. Of large tensors and of other objects it names the kind alone."""
    if type(value) in _PLAIN or isinstance(value, Number | str):
        return str(value)
    if isinstance(value, torch.Tensor):
        is_small = value.numel() <= _MOST_VALUES and value.layout is torch.strided and not value.is_meta
        return f"a tensor of {value.detach().tolist() if is_small else (value.dtype, tuple(value.shape))}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_shown, value))}]"
    return type(value).__name__


def difference(of_ranks: Sequence[Mapping[str, str]]) -> tuple[int | None, str]:
    """The first rank with other settings than rank 0, and what differs: names, values and ranks."""
    names = list(dict.fromkeys(name for values in of_ranks for name in values))
    differing = [name for name in names if len({values.get(name) for values in of_ranks}) > 1]
    rank = next((at for at, values in enumerate(of_ranks) if values != of_ranks[0]), None)
    parts = []
    for name in differing[:_MOST_NAMED]:
        ranks: dict[str, list[int]] = {}
        for at, values in enumerate(of_ranks):
            ranks.setdefault(values.get(name, "missing"), []).append(at)
        parts.append(f"{name} is " + " and ".join(f"{value} on {_listed(at)}" for value, at in ranks.items()))
    more = f"; {len(differing) - _MOST_NAMED} more differ" if len(differing) > _MOST_NAMED else ""
    return rank, "; ".join(parts) + more


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")


# Optimizers.


class _Parameters:
    """The parameters of an optimizer in its order, and a checksum of what machines must have alike of them."""

    def __init__(self, params: Sequence[Any], records: Mapping[int, ParameterRecord]) -> None:
        """`records`: those of the models by the ids of their masters."""
        self.params = params
        self.records = [records.get(id(param)) for param in params]
        self.flags = self._flags()
        with torch._C.DisableTorchFunctionSubclass():  # that of masters would take longer than all of this
            self.texts = [
                f"{'a tensor outside of the model' if record is None else record.name} ({param.dtype}, shape "
                f"{tuple(param.shape)}, requires_grad={flag})"
                for param, record, flag in zip(params, self.records, self.flags, strict=True)
            ]
        self.digest = _digest(self.texts)

    def _flags(self) -> list[bool]:
        return [record is None or record.param.requires_grad for record in self.records]

    def are(self, params: Sequence[Any]) -> bool:
        """Whether these are the parameters, and their flags have not changed."""
        return len(params) == len(self.params) and all(map(is_, params, self.params)) and self.flags == self._flags()


class OptimizerSettings:
    """Describes the optimizers of a group of models. Keeps the description of parameters, which hardly ever changes."""

    def __init__(self, stores: Sequence[LayerStore]) -> None:
        """`stores`: of the models."""
        self._stores = stores
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Parameters] = weakref.WeakKeyDictionary()

    def of(self, optimizer: torch.optim.Optimizer) -> Settings:
        """Class, options and parameters of an optimizer."""
        groups, kind = optimizer.param_groups, type(optimizer)
        params = [param for group in groups for param in group["params"]]
        known = self._known.get(optimizer)
        if known is None or not known.are(params):
            records = {id(record.master): record for store in self._stores for record in store.parameters}
            known = self._known[optimizer] = _Parameters(params, records)
        head = {
            "the class of the optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "the sizes of parameter groups": _shown([len(group["params"]) for group in groups]),
        }
        options = [{name: _shown(group[name]) for name in sorted(group) if name != "params"} for group in groups]
        texts = known.texts

        def values() -> Mapping[str, str]:
            named = {
                f"{name} of parameter group {at}": text for at, o in enumerate(options) for name, text in o.items()
            }
            return {**head, **named, **_numbered(texts)}

        return Settings(_digest([*head.values(), *map(str, options), known.digest]), values)


def _numbered(params: Sequence[str]) -> dict[str, str]:
    return {f"parameter {at}": text for at, text in enumerate(params)}
