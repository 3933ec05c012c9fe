"""Kernels that run on GPUs alone: they are set aside while a model runs on the host.

Code that patches a model with such kernels (liger-kernel, kernels from the hub) replaces forwards of modules or of
classes, and functions and classes in the Python modules that define the model.

[Note: plain code] A forward that was replaced on a module is the attribute of its class. Of what was replaced in a
Python module, nothing is left; a copy of that Python module, executed once more, has it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.split.transformers import is_pretrained

logger = logging.getLogger("roundpipe")
_MISSING = object()
_OF_GPU = re.compile("triton|cuda|gpu|active drivers", re.IGNORECASE)  # what errors of such kernels say
_NOT_KERNELS = frozenset(("torch", "triton", "transformers", "peft", "roundpipe"))  # packages between model and kernel
_NOT_THE_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}  # see split/head_loss.py


class NeedsGpu(ConfigError):
    """A module has computed on the host with a kernel for GPUs. `package`: that the kernel is part of."""

    def __init__(self, path: str, module: nn.Module, package: str, error: Exception) -> None:
        self.package = package
        super().__init__(
            f"{path or 'the model'} ({type(module).__name__}) computes with code of {package} that runs on GPUs alone, "
            f"and RoundPipe runs the model once on the host to split it into layers: {type(error).__name__}: {error}. "
            "Load the model without these kernels, or let the module compute with plain torch where its inputs are in "
            "host memory."
        )


def needs_gpu(error: Exception, root: nn.Module) -> NeedsGpu | None:
    """The exception to raise if running `root` on the host has raised the error of a kernel for GPUs."""
    if not _OF_GPU.search(str(error)):
        return None
    paths = {id(module): path for path, module in root.named_modules()}
    path, module, package = "", root, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path, module, package = paths[id(owner)], owner, ""
        package = package or _kernels_in(str(frame.f_globals.get("__name__", "")))
    return NeedsGpu(path, module, package or type(module).__module__, error)


def _kernels_in(name: str) -> str:
    """The package of a Python module, if it may have kernels; else an empty string."""
    package = name.partition(".")[0]
    return "" if package in _NOT_KERNELS else package


class _Patch(NamedTuple):
    """An entry of a dict that code for GPUs has replaced; _MISSING: there is no entry."""

    holder: dict[str, Any]
    name: str
    plain: Any
    patched: Any

    def set_aside(self) -> None:
        _put(self.holder, self.name, self.plain)

    def put_back(self) -> None:
        _put(self.holder, self.name, self.patched)


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value


class GpuKernels:
    """The kernels for GPUs in a model: those of the user, which the first run on the host finds, and those of ours."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._of_user: list[_Patch] = []
        self._ours: list[_Patch] = []
        self._packages: set[str] = set()

    def apply_liger(self, options: Mapping[str, bool]) -> None:
        """Patch rotary embeddings, norms and gated feed-forward parts, but not the loss: see split/head_loss.py."""
        try:
            apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
        except ImportError as error:
            raise ConfigError(
                "liger_kernels=True needs the package liger-kernel: pip install liger-kernel, or leave the option out."
            ) from error
        # liger-kernel cannot undo its patches. To find them, compare all dicts that it may change, before and after.
        holders = [*_code_of(self._model).values(), *(module.__dict__ for module in self._model.modules())]
        before = [dict(holder) for holder in holders]
        inner = next((module for module in self._model.modules() if is_pretrained(module)), self._model)
        apply(model=inner, **{**options, **_NOT_THE_LOSS})
        self._ours = [
            _Patch(holder, name, old.get(name, _MISSING), value)
            for holder, old in zip(holders, before, strict=True)
            for name, value in holder.items()
            if old.get(name, _MISSING) is not value
        ]
        if not self._ours:
            raise ConfigError(
                f"liger_kernels=True: liger-kernel has no kernels for {type(inner).__name__}; leave the option out."
            )

    def find(self, package: str) -> bool:
        """Find what a package has replaced in the model, to set it aside from now on; returns whether that is new.

        The forward of a whole model is replaced for good: it computes the loss, which RoundPipe does by itself.
        """
        if package in self._packages:
            return False
        self._packages.add(package)
        found = list(_patches_of(self._model, package))
        for module in filter(is_pretrained, self._model.modules()):
            for patch in [each for each in found if each.holder is module.__dict__ and each.name == "forward"]:
                found.remove(patch)
                patch.set_aside()
                logger.info(
                    "the forward that %s gave %s is replaced by the plain one: RoundPipe computes head and loss in "
                    "chunks itself",
                    package,
                    type(module).__name__,
                )
        self._of_user += found
        return True

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Run the plain code while entered. No other thread may run the model meanwhile."""
        patches = [*self._of_user, *self._ours]
        for patch in reversed(patches):
            patch.set_aside()
        try:
            yield
        finally:
            for patch in patches:
                patch.put_back()

    def remove(self) -> None:
        """Undo our patches."""
        for patch in reversed(self._ours):
            patch.set_aside()
        self._ours = []


def _code_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The contents of the Python modules that define the classes of a model's modules, by their names."""
    names = sorted({type(module).__module__ for module in model.modules()} & sys.modules.keys())
    return {name: sys.modules[name].__dict__ for name in names}


def _patches_of(model: nn.Module, package: str) -> Iterator[_Patch]:
    """What a package has replaced in a model and in the code of it; see [Note: plain code]."""

    def is_of(value: Any) -> bool:
        value = value.__func__ if isinstance(value, types.MethodType) else value
        is_code = isinstance(value, type | types.FunctionType)
        return is_code and (value.__module__ or "").partition(".")[0] == package

    code = {name: held for name, held in _code_of(model).items() if _kernels_in(name) != package}
    plain_classes: dict[type, type] = {}  # by class of the package: the class in whose place it is
    for name, held in code.items():
        for key, value in [(key, value) for key, value in held.items() if is_of(value)]:
            plain = _executed_again(name).get(key, _MISSING)
            if plain is not _MISSING and not is_of(plain):
                yield _Patch(held, key, plain, value)
                if isinstance(value, type) and isinstance(plain, type):
                    plain_classes.setdefault(value, plain)
    for module in model.modules():
        cls, own = type(module), module.__dict__
        if is_of(own.get("forward")) and not is_of(cls.forward):
            yield _Patch(own, "forward", _MISSING, own["forward"])
        elif is_of(cls.forward) or is_of(own.get("forward")):
            plain_class: Any = plain_classes.get(cls) or _executed_again(cls.__module__).get(cls.__name__)
            if plain_class is not None and not is_of(plain_class.forward):
                forward = types.MethodType(plain_class.forward, module)
                yield _Patch(own, "forward", forward, own.get("forward", _MISSING))
                yield from _activation(module)


def _activation(module: nn.Module) -> Iterator[_Patch]:
    """What plain feed-forward parts call and those of liger-kernel do not have."""
    name = getattr(getattr(module, "config", None), "hidden_act", None)
    functions = getattr(sys.modules.get("transformers.activations"), "ACT2FN", {})
    if not hasattr(module, "act_fn") and name in functions:
        yield _Patch(module.__dict__, "act_fn", functions[name], _MISSING)


@functools.cache
def _executed_again(name: str) -> dict[str, Any]:
    """The contents of a Python module as its code makes them; empty if it cannot be executed."""
    try:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        return vars(fresh)
    except Exception as error:
        logger.debug("%s cannot be executed again: %r", name, error)
        return {}
