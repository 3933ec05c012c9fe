"""Stubs, and copies of a model's module tree in which blocks and taps are stubs.

The model's code runs on such a tree as on the model. A stub is an instance of a subclass of the module's class, so
isinstance and attribute checks give the same answers. A stub forwards its calls to the *director* of the running
forward pass. The director is stored in a context variable, so no module is patched and threads do not affect each
other.
Knows modules and placeholders: no plans and no devices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Set
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from roundpipe.errors import ModelChangedError, ModelSplitError
from roundpipe.module_copy import ModulePair, copy_tree
from roundpipe.module_names import PATH, joined
from roundpipe.split.transformers import is_pretrained
from roundpipe.split.values import Outline, placeholder

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # classes without a forward: the model's code uses only their elements


class Director(Protocol):
    """Decides what the calls of stubs do and return."""

    device: torch.device

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the stub for the module at `path`."""
        ...

    def loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the model's loss function, `plain`."""
        ...


_director: ContextVar[Director] = ContextVar("roundpipe_director")


@contextlib.contextmanager
def directed_by(director: Director) -> Iterator[None]:
    """Send the calls of all stubs in this thread to `director`."""
    token = _director.set(director)
    try:
        yield
    finally:
        _director.reset(token)


class Ghosts:
    """Ghosts: empty parameters that stubs have in place of the module's, one per floating-point dtype of a model.

    Model code often reads `next(module.parameters()).dtype`. On a stub, this returns the dtype of its ghost.
    """

    def __init__(self, model: nn.Module) -> None:
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        self._by_dtype = {dtype: nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False) for dtype in dtypes}

    def all(self) -> list[nn.Parameter]:
        return list(self._by_dtype.values())

    def of(self, module: nn.Module) -> nn.Parameter | None:
        """Return the ghost for a module's stub; None if the module has no floating-point parameter."""
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
        return None if dtype is None else self._by_dtype[dtype]


class Missing(NamedTuple):
    """A parameter that a copied module of a stub tree lacks, while its original in the model has it."""

    path: str  # the path of the copied module from the tree's root
    name: str  # the name of the parameter in the module
    outline: Outline


class StubTree(nn.Module):
    """A copy of a model, `root`, that has stubs for blocks and taps and holds only some of the weights.

    Modules that contain stubs are shallow copies and run the code of their originals. Parameters that they lack are
    replaced by placeholders of NaN, which `fill_in` makes on the device where the tree runs.
    """

    def __init__(
        self,
        model: nn.Module,
        stubs: frozenset[str],
        is_real: Callable[[nn.Module], bool],
        owned: Set[int],
        ghosts: Ghosts,
    ) -> None:
        """Build the tree.

        stubs: the paths of blocks and taps.
        is_real: whether the tree includes a module. A module with a stub is included as a submodule of the stub.
        owned: the ids of the parameters that the tree holds.
        """
        super().__init__()
        self.stubs = stubs
        self.needs = frozenset(name for name, param in model.named_parameters() if id(param) in owned)
        self.present: set[str] = set()  # paths of the stubs whose modules are included
        # If a module occurs several times in the model, `place` has the first of its paths.
        place = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        containing = _above(model, stubs, place)

        def stand_in(module: nn.Module) -> nn.Module | None:
            path = place[id(module)]
            if path in stubs:
                real = module if is_real(module) else None
                if real is not None:
                    self.present.add(path)
                stub = make_stub(module, path, real, ghosts.of(module))
                if real is None and any(id(param) in owned for param in module.parameters()):
                    stub.__dict__["_modules"]["read"] = _held(module, owned)
                return stub
            if path in containing or isinstance(module, _CONTAINERS):
                return None
            return module if is_real(module) else make_stub(module, path, None, ghosts.of(module))

        self.root, pairs = copy_tree(model, stand_in, lambda param: param if id(param) in owned else None)
        # The pairs refer to the model's modules, which must not become submodules of the tree. So they are stored in
        # __dict__, where nn.Module does not see them.
        self.__dict__["_pairs"] = pairs
        for pair in pairs:
            pair.copy.__dict__[PATH] = place[id(pair.original)]
            _stub_loss(pair)
        paths = {id(copy): path for path, copy in self.root.named_modules()}
        self.missing = [
            Missing(paths[id(pair.copy)], name, Outline.of(param))
            for pair in pairs
            for name, param in pair.original._parameters.items()
            if param is not None and id(param) not in owned
        ]

    def refresh(self) -> None:
        """Copy attributes that the user changed on the model's modules since the last refresh to the tree's modules.

        Raises ModelChangedError if the user added, replaced or removed a parameter or submodule.
        """
        for pair in self.__dict__["_pairs"]:
            changed = pair.changed_parts()
            if changed:
                raise ModelChangedError(
                    f"{f'{pair.copy.__dict__[PATH]}.{changed[0]}'.lstrip('.')!r} of the "
                    f"{type(pair.original).__name__} was added, replaced or removed after wrapping; resize or change "
                    "the model before wrapping it, or close() and wrap it again."
                )
            if pair.sync():
                _stub_loss(pair)  # sync may have overwritten the stub with the user's loss function

    def fill_in(self, device: torch.device) -> None:
        """Set placeholders on `device` for the missing parameters. Results that depend on a placeholder are NaN."""
        for missing in self.missing:
            own = self.root.get_submodule(missing.path).__dict__
            present = own.get(missing.name)
            if not isinstance(present, torch.Tensor) or present.device != device:
                own[missing.name] = placeholder(missing.outline, device)


def _above(model: nn.Module, stubs: Set[str], place: dict[int, str]) -> set[str]:
    """Return the paths of the modules that contain a stub."""
    modules = dict(model.named_modules(remove_duplicate=False))
    above = {
        prefix
        for path, module in modules.items()
        if path and place[id(module)] in stubs
        for prefix in itertools.accumulate(["", *path.split(".")[:-1]], joined)
    }
    return {place[id(modules[prefix])] for prefix in above}


def refuse_offloading(module: nn.Module) -> None:
    """Raise ModelSplitError if accelerate has replaced the module's forward by one that moves weights to devices."""
    if "_hf_hook" in module.__dict__:
        raise ModelSplitError(
            f"the forward of its {type(module).__name__} was replaced by hooks of accelerate, which move weights; "
            "remove them before wrapping (accelerate.hooks.remove_hook_from_submodules)"
        )


class Stub:
    """Mixin for a subclass of the module's class: calls of the stub go to the director.

    If the tree includes the module, it is `_modules["real"]`, and attributes are read from it. Otherwise attributes are
    read from the original. Parameters are then returned as placeholders, because their values are not on this device,
    except those that the tree holds: they are in `_modules["read"]`.
    """

    def __del__(self) -> None:
        """Do nothing: a finalizer of the module's class would release what the module still uses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        director = _director.get(None)
        if director is None:
            raise ModelSplitError(
                f"{self.__dict__[PATH]} is called when the model's forward has returned, for example by a checkpoint "
                "in the model's own code"
            )
        return director.call(self, self.__dict__[PATH], args, kwargs)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        present = own["_modules"].get("real", own["_modules"].get("read"))
        return getattr(present, name) if present is not None else _attribute_of_absent(own["stub_original"], name)


def _attribute_of_absent(original: nn.Module, name: str) -> Any:
    value = getattr(original, name)
    director = _director.get(None)
    # Without a director no forward pass is running; the stub is being printed, for example.
    if director is None or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, nn.Parameter):
        return placeholder(Outline.of(value), director.device)
    return value.to(director.device)


def make_stub(original: nn.Module, path: str, real: nn.Module | None, ghost: nn.Parameter | None) -> nn.Module:
    """Return a stub for `original`. real: the module, if the tree includes it, else None. ghost: see `Ghosts`."""
    cls = _stub_class(type(original))  # type: ignore[arg-type]
    stub: nn.Module = cls.__new__(cls)
    own = stub.__dict__
    own.update({name: value for name, value in original.__dict__.items() if name != "forward"})
    own["_parameters"] = {} if ghost is None else {"ghost": ghost}
    own["_buffers"] = {}
    own["_modules"] = {} if real is None else {"real": real}
    own[PATH] = path
    own["stub_original"] = _Reference(original)
    return stub


@functools.cache
def _stub_class(cls: type[nn.Module]) -> type[nn.Module]:
    # The stub's class has the name of the module's class, because some model code compares names of classes.
    return type(cls.__name__, (Stub, cls), {"__module__": cls.__module__})


class _Held:
    """Mixin for a subclass of the module's class: holds some parameters of a module that the tree does not include.

    Code outside of a block may read weights inside of it. Other attributes are read as those of a stub.
    """

    def __del__(self) -> None:
        """Do nothing, as in a stub."""

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for held in (own["_parameters"], own["_modules"]):
            if name in held:
                return held[name]
        return _attribute_of_absent(own["stub_original"], name)


def _held(original: nn.Module, owned: Set[int]) -> nn.Module:
    """Return a copy of a module and its submodules with the parameters in `owned` and no others."""
    cls = _held_class(type(original))  # type: ignore[arg-type]
    held: nn.Module = cls.__new__(cls)
    own = held.__dict__
    own.update(original.__dict__)
    own["_parameters"] = {name: param for name, param in original._parameters.items() if id(param) in owned}
    own["_buffers"] = {}
    children = original._modules.items()
    own["_modules"] = {name: None if child is None else _held(child, owned) for name, child in children}
    own["stub_original"] = _Reference(original)
    return held


@functools.cache
def _held_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Held, cls), {"__module__": cls.__module__})


class _Reference:
    """Holds a module and gives access to its attributes, without making it a submodule of its holder."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def unstubbed(value: Any) -> Any:
    """Return the module that a stub replaces, if the tree includes this module. All other values are returned as is."""
    if isinstance(value, Stub):
        real: Any = value.__dict__["_modules"].get("real")
        return value if real is None else real
    return value


def _stub_loss(pair: ModulePair) -> None:
    """Replace the loss function of a copied transformers model by a stub."""
    if is_pretrained(pair.copy) and hasattr(type(pair.copy), "loss_function"):
        pair.copy.__dict__["_loss_function"] = _LossStub(pair.original)


class _LossStub:
    """Sends calls of a model's loss function to the director."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `loss_function` is read at the call and not earlier: the property raises for models without a loss, and the
        # user may replace the function at any time.
        return _director.get().loss(self._original.loss_function, args, kwargs)
