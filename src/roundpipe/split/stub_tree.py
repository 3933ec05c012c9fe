"""A copy of a model's module tree in which blocks and taps are stubs and only some weights are at hand.

The modules above blocks and taps run as they are, so their class and attributes are the original's; a parameter of
theirs that is not at hand is a placeholder, set where the tree runs.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import nn

from roundpipe.errors import ModelChangedError, ModelSplitError
from roundpipe.module_copy import CONTENT, copy_tree, translated
from roundpipe.split.head_loss import watch_loss
from roundpipe.split.stubs import PATH, make_stub
from roundpipe.split.values import Outline, placeholder

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called, only looked into


class Ghosts:
    """Empty parameters, one for each dtype of a model: see make_stub."""

    def __init__(self, model: nn.Module) -> None:
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        self._by_dtype = {dtype: nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False) for dtype in dtypes}

    def all(self) -> list[nn.Parameter]:
        return list(self._by_dtype.values())

    def of(self, module: nn.Module) -> nn.Parameter | None:
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
        return None if dtype is None else self._by_dtype[dtype]


class Missing(NamedTuple):
    """A parameter of a module above the stubs that is not at hand. `path`: of the module, below the tree's root."""

    path: str
    name: str
    outline: Outline


class StubTree(nn.Module):
    """Not a part of the model's computation: `root` is. Knows which placeholders its modules need."""

    def __init__(
        self,
        model: nn.Module,
        stubs: frozenset[str],
        is_real: Callable[[nn.Module], bool],
        owned: Set[int],
        ghosts: Ghosts,
    ) -> None:
        """stubs: paths of blocks and taps. is_real: whether a stub has its module. owned: ids of parameters at hand."""
        super().__init__()
        self.stubs = stubs
        self.needs = frozenset(name for name, param in model.named_parameters() if id(param) in owned)
        place = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        containing = above(model, stubs)
        self.at_hand: set[str] = set()  # of the stubs, those whose modules are there

        def stand_in(module: nn.Module) -> nn.Module | None:
            path = place[id(module)]
            if path in stubs:
                real = module if is_real(module) else None
                if real is not None:
                    self.at_hand.add(path)
                return make_stub(module, path, real, ghosts.of(module))
            if path in containing or isinstance(module, _CONTAINERS):
                refuse_own_forward(module)
                return None
            return module if is_real(module) else make_stub(module, path, None, ghosts.of(module))

        self.root, pairs = copy_tree(model, stand_in, lambda param: param if id(param) in owned else None)
        self.__dict__["_links"] = [_Link(place[id(original)], original, copy) for original, copy in pairs]
        for original, copy in pairs:
            copy.__dict__[PATH] = place[id(original)]
            watch_loss(original, copy)
        paths = {id(copy): path for path, copy in self.root.named_modules()}
        self.missing = [
            Missing(paths[id(copy)], name, Outline.of(param))
            for original, copy in pairs
            for name, param in original._parameters.items()
            if param is not None and id(param) not in owned
        ]

    def refresh(self) -> None:
        """Take over what the user has changed on the model's modules since."""
        for link in self.__dict__["_links"]:
            link.refresh()

    def fill_in(self, device: torch.device) -> None:
        """Let parameters that are not at hand be there for whoever looks; what depends on them is NaN."""
        for missing in self.missing:
            own = self.root.get_submodule(missing.path).__dict__
            present = own.get(missing.name)
            if not isinstance(present, torch.Tensor) or present.device != device:
                own[missing.name] = placeholder(missing.outline, device)


class _Link:
    """A module of the model's and its copy in a tree; knows which attributes both had when they last agreed."""

    def __init__(self, path: str, original: nn.Module, copy: nn.Module) -> None:
        self._path, self._original, self._copy = path, original, copy
        self._agreed = dict(original.__dict__)
        self._content = self._ids()

    def _ids(self) -> list[tuple[str, int]]:
        own = self._original
        return [(name, id(part)) for name, part in (*own._parameters.items(), *own._modules.items())]

    def refresh(self) -> None:
        if self._ids() != self._content:
            changed = sorted({name for name, _ in set(self._ids()) ^ set(self._content)}) or ["the order of its parts"]
            raise ModelChangedError(
                f"{f'{self._path}.{changed[0]}'.lstrip('.')!r} of the {type(self._original).__name__} was added, "
                "replaced or removed after wrapping; resize or change the model before wrapping it, or close() and "
                "wrap it again."
            )
        for name, value in self._original.__dict__.items():
            if self._agreed.get(name, self) is not value and name not in CONTENT:
                self._agreed[name] = value
                if name != "_loss_function":  # its stub looks that up
                    self._copy.__dict__[name] = translated(value, self._original, self._copy, {})


def above(model: nn.Module, stubs: Set[str]) -> set[str]:
    """Modules that contain a stub."""
    by_id = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    return {
        path
        for path, module in model.named_modules()
        if any(by_id[id(inner)] in stubs for inner in module.modules() if inner is not module)
    }


def refuse_own_forward(module: nn.Module) -> None:
    """A forward set on the instance would call the original's submodules, past every stub."""
    forward = module.__dict__.get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not module:
        raise ModelSplitError(
            f"the forward of its {type(module).__name__} was replaced on the instance, as offloading hooks do; remove "
            "them before wrapping (accelerate.hooks.remove_hook_from_submodules)"
        )
