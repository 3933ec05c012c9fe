"""Which modules of a layer are compiled, and with which arguments of torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from roundpipe.errors import ArgumentTypeError, ConfigError

_NAMES = ("backend", "dynamic", "fullgraph", "mode", "options")
_CUDA_GRAPHS = "triton.cudagraphs"


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Arguments of torch.compile. The defaults are those of torch.

    dynamic: None compiles the first shapes as they are and makes sizes variable when other ones come. True makes them
        variable from the beginning, False never.
    fullgraph: a layer that cannot be compiled raises; otherwise it runs eagerly.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: bool | None = None
    fullgraph: bool = False

    @property
    def draws_as_eager(self) -> bool:
        """Whether compiled code draws the random numbers of the eager code; see [Note: random numbers] in `kinds`."""
        return dict(self.options).get("fallback_random", True) is not False

    @classmethod
    def of(cls, value: object) -> CompileOptions | None:
        """The options for the argument `compile` of a wrapper: True, False, or a dict of arguments; None for False.

        Options are returned as they are.
        """
        if isinstance(value, CompileOptions):
            return value
        if isinstance(value, bool) or value is None:
            return cls() if value else None
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(
                f"compile must be True, False or a dict of arguments of torch.compile, got {type(value).__name__}."
            )
        unknown = [str(name) for name in value if name not in _NAMES]
        if unknown:
            raise ConfigError(
                f"compile has the unknown arguments {', '.join(unknown)}; those of torch.compile that it takes are "
                f"{', '.join(_NAMES)}."
            )
        given = {name: setting for name, setting in value.items() if setting is not None}
        options = given.pop("options", {})
        if not isinstance(options, Mapping):
            raise ArgumentTypeError(f"compile: options must be a dict, got {type(options).__name__}.")
        for name in ("dynamic", "fullgraph"):
            if not isinstance(given.get(name, True), bool):
                raise ArgumentTypeError(f"compile: {name} must be True or False, got {given[name]!r}.")
        if options and given.get("mode") is not None:
            raise ConfigError("compile: give either mode or options, as to torch.compile.")
        if given.get("mode") in ("reduce-overhead", "max-autotune") or options.get(_CUDA_GRAPHS):
            raise ConfigError(
                "compile: CUDA graphs keep the addresses of weights, and here weights change their place for every "
                "use. Of the modes of torch.compile take 'default' or 'max-autotune-no-cudagraphs'."
            )
        return cls(**given, options=tuple(sorted(options.items())))


def inside_of(module: nn.Module) -> nn.Module:
    """The module inside of a wrapper of torch.compile; any other module is returned as it is."""
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return module if inner is None else inner


def without_wrappers(model: nn.Module) -> nn.Module:
    """Put the modules inside of torch.compile's wrappers in the wrappers' places, compiled as by `module.compile()`.

    Returns the model; if it is a wrapper itself, the module inside.
    """
    inner = inside_of(model)
    if inner is not model:
        inner.__dict__["_compiled_call_impl"] = model.__dict__["dynamo_ctx"](inner._call_impl)
    for name, child in inner.named_children():
        inner._modules[name] = without_wrappers(child)
    return inner


def options_of_user(module: nn.Module) -> CompileOptions | None:
    """The arguments with which the user has compiled a module; None if he has not.

    Both torch.compile(module) and module.compile() are known. torch keeps the arguments in private attributes: if it no
    longer does, those are the defaults. CUDA graphs are left out.
    """
    call = module._compiled_call_impl
    if module is not inside_of(module):
        context = module.__dict__.get("dynamo_ctx")
    elif call is not None:
        code = getattr(call, "get_compiler_config", None)
        cells = dict(zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)) if code is not None else {}
        context = cells["self"].cell_contents if "self" in cells else None
    else:
        return None
    made: Any = getattr(context, "callback", None)
    while hasattr(made, "_torchdynamo_orig_backend"):
        made = made._torchdynamo_orig_backend
    arguments = getattr(made, "kwargs", {})
    options = {**getattr(made, "config", {}), **arguments.get("options", {})}
    options.pop(_CUDA_GRAPHS, None)
    return CompileOptions(
        backend=getattr(made, "compiler_fn", "inductor"),
        mode=arguments.get("mode"),
        options=tuple(sorted(options.items())),
        dynamic=getattr(context, "_dynamic", None),
        fullgraph=getattr(context, "fullgraph", False),
    )


class PartsToCompile:
    """Which modules of the layers of a model are compiled, with which arguments of torch.compile.

    options: of all layers; None: only modules that the user compiled, and modules inside of those.
    """

    def __init__(self, options: CompileOptions | None, model: nn.Module) -> None:
        self._options = options
        self._by_user: dict[nn.Module, CompileOptions] = {}
        if options is None:
            self._find(model, None)

    def _find(self, module: nn.Module, of_parent: CompileOptions | None) -> None:
        options = options_of_user(module) or of_parent
        if options is not None:
            self._by_user[inside_of(module)] = options
        for child in module.children():
            self._find(child, options)

    def whole(self, module: nn.Module) -> CompileOptions | None:
        """The options with which all of a module is compiled, if that is so."""
        return self._options or self._by_user.get(module)

    def __bool__(self) -> bool:
        return self._options is not None or bool(self._by_user)

    def of(self, layer: nn.Module) -> list[tuple[nn.Module, CompileOptions]]:
        """The modules of a layer that are compiled, without wrappers. No part is inside of another one.

        A layer that runs code of ours around the user's module names that module, or None, in `part_to_compile`.
        """
        whole: nn.Module | None = getattr(layer, "part_to_compile", layer)
        found: list[tuple[nn.Module, CompileOptions]] = []

        def look_into(module: nn.Module) -> None:
            module = inside_of(module)
            options = self.whole(module)
            if options is not None:
                found.append((module, options))
                return
            for child in module.children():
                look_into(child)

        if whole is not None:
            look_into(whole)
        return found
