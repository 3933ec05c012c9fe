"""Decides which submodules of a model become RoundPipes, by the rules of `wrap_model_to_roundpipe`.

Considers sizes, types and shared parameters. Changes no module and starts nothing.

The rules, the first that applies to a module:

    is in skip_modules                                stays as it is
    is an nn.Sequential                               becomes a RoundPipe with one layer per child
    has a forward, and its own parameters take
    lower_threshold or more, or all its parameters
    take upper_threshold or less                      becomes a RoundPipe with one layer
    is an nn.ModuleList                               each element with a forward becomes a RoundPipe
    any other                                         the rules apply to its children

[Note: one owner] A parameter belongs to at most one RoundPipe. If these rules would put a parameter into two
RoundPipes, or into one and outside of all, then the smallest module that contains all places of the parameter and has a
forward becomes a RoundPipe with one layer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Container, Iterator

from torch import nn

from roundpipe.api.roundpipe import is_chain
from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import OwnershipError

logger = logging.getLogger("roundpipe")

AS_USUAL = RoundPipeRunConfig()
IN_ONE_PIECE = RoundPipeRunConfig(num_microbatch=1)
UNMERGED = RoundPipeRunConfig(merge_output=False)  # the forward of the whole model gets LateMerge tensors


@dataclasses.dataclass(frozen=True)
class Part:
    """A module that becomes a RoundPipe. `path`: its dotted name in the root; empty for the root itself."""

    path: str
    module: nn.Module
    config: RoundPipeRunConfig = AS_USUAL


@dataclasses.dataclass(frozen=True)
class WrapRules:
    """The options that decide which parts of a model are wrapped, and how. The module docstring states the rules."""

    lower_threshold: int
    upper_threshold: int
    skip_modules: Container[nn.Module]

    def parts(self, root: nn.Module) -> list[Part]:
        """The modules that become RoundPipes: the root alone, or submodules none of which contains another."""
        parts = self._parts(root, "")
        # A parameter can still have two owners after [Note: one owner]: a root such as a ModuleList has no forward.
        shared = shared_parameter(root, parts)
        if shared is not None:
            raise OwnershipError(
                f"{shared[0]!r} and {shared[1]!r} are one parameter, but no module with a forward contains both; a "
                "parameter can be in one RoundPipe only: give each its own parameter, or skip both modules."
            )
        return parts

    def _parts(self, module: nn.Module, path: str) -> list[Part]:
        """The parts in one module. `path`: its dotted name in the root."""
        if module in self.skip_modules:
            return []
        if is_chain(module):
            return [Part(path, module, _config_of(module))] if len(module) else []
        own_bytes, total_bytes = size_bytes(module, recurse=False), size_bytes(module)
        if has_forward(module) and (own_bytes >= self.lower_threshold or total_bytes <= self.upper_threshold):
            return [self._whole(module, path)]
        if isinstance(module, nn.ModuleList):
            parts = self._elements(module, path)
        else:
            parts = [p for name, child in module.named_children() for p in self._parts(child, join(path, name))]
        return self._with_one_owner(module, path, unique(parts))

    def _whole(self, module: nn.Module, path: str) -> Part:
        # In a small module the work of splitting and merging would exceed the gain.
        is_small = size_bytes(module) < self.lower_threshold
        return Part(path, module, IN_ONE_PIECE if is_small else _config_of(module))

    def _elements(self, elements: nn.ModuleList, path: str) -> list[Part]:
        """The parts in a list of modules. An element followed by another RoundPipe passes its outputs on unmerged."""
        children = [(name, child) for name, child in elements._modules.items() if child is not None]
        wrapped = [child not in self.skip_modules and can_run(child) for _, child in children]
        parts = []
        for i, (name, child) in enumerate(children):
            if wrapped[i]:
                is_followed = any(wrapped[i + 1 : i + 2])
                config = _config_of(child)
                parts.append(Part(join(path, name), child, UNMERGED.over(config) if is_followed else config))
            else:
                parts += self._parts(child, join(path, name))
        return parts

    def _with_one_owner(self, module: nn.Module, path: str, parts: list[Part]) -> list[Part]:
        """The given parts of the module, or the module as one part: see [Note: one owner]."""
        shared = shared_parameter(module, parts)
        if shared is None or not has_forward(module):
            return parts  # without a forward the module cannot run as a whole; its parent decides
        first, second = (join(path, name) for name in shared)
        for name, inner in module.named_modules():
            if inner in self.skip_modules:
                raise OwnershipError(
                    f"{first!r} and {second!r} are one parameter, so {path or 'the model'!r} must be wrapped as a "
                    f"whole, but it contains {join(path, name)!r}, which is in skip_modules: skip the modules that "
                    "share the parameter as well, or do not skip this one."
                )
        logger.warning(
            "%s is wrapped as one layer because %r and %r in it are one parameter", path or "the model", first, second
        )
        return [self._whole(module, path)]


def has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def can_run(module: nn.Module) -> bool:
    """Whether the module can be a RoundPipe: it has a forward and is not an empty nn.Sequential."""
    return has_forward(module) and not (is_chain(module) and len(module) == 0)


def _config_of(module: nn.Module) -> RoundPipeRunConfig:
    """One microbatch if the module cannot be split along the first dimension, else the defaults."""
    return AS_USUAL if layer_with_batch_elsewhere(module) is None else IN_ONE_PIECE


def layer_with_batch_elsewhere(module: nn.Module) -> nn.Module | None:
    """The first layer of torch.nn in the module whose batch dimension is not the first one; None if there is none.

    These are recurrent layers, because of their states, and layers made with batch_first=False. The function does not
    look into classes of the user: their inputs and outputs need not be those of the layers inside.
    """
    for layer in list(module) if is_chain(module) else [module]:
        if type(layer).__module__.startswith("torch.nn.") and not is_chain(layer):
            for inner in layer.modules():
                if isinstance(inner, nn.RNNBase) or getattr(inner, "batch_first", True) is False:
                    return layer
    return None


def size_bytes(module: nn.Module, recurse: bool = True) -> int:
    """Bytes of the module's parameters, each counted once."""
    return sum(param.nbytes for param in module.parameters(recurse))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def unique(parts: list[Part]) -> list[Part]:
    """The parts with each module once. A module in several places merges its outputs if one place needs them merged."""
    found: dict[nn.Module, Part] = {}
    for part in parts:
        first = found.setdefault(part.module, part)
        if first.config.merge_output is False:  # earlier places need no merged outputs; this one may
            found[part.module] = dataclasses.replace(part, path=first.path)
    return list(found.values())


def shared_parameter(root: nn.Module, parts: Collection[Part]) -> tuple[str, str] | None:
    """Two names, in `root`, of a parameter that would have two owners; None if there is no such parameter."""
    wrapped = {part.module for part in parts}
    holders: list[tuple[nn.Module | None, nn.Module]] = [(module, module) for module in wrapped]
    holders += [(None, module) for _, module in bare_modules(root, wrapped)]  # None: outside of all parts
    owners: dict[nn.Parameter, nn.Module | None] = {}
    for owner, module in holders:
        for param in module.parameters(recurse=owner is not None):
            if owners.setdefault(param, owner) is not owner:
                names = [name for name, other in root.named_parameters(remove_duplicate=False) if other is param]
                return names[0], names[-1]
    return None


def bare_modules(
    root: nn.Module, wrapped: Container[nn.Module], path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The bare modules with their paths: the root and its submodules, each once, that are in no wrapped module."""
    seen = set() if seen is None else seen
    if root in seen or root in wrapped:
        return
    seen.add(root)
    yield path, root
    for name, child in root.named_children():
        yield from bare_modules(child, wrapped, join(path, name), seen)
