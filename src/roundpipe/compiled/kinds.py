"""Code that torch.compile makes once for all layers of a kind.

Layers are of one kind if their modules have the same classes, flags and hooks, and parameters of the same shapes and
dtypes. Each kind has separate functions, which torch.compile compiles: its cache belongs to the code object of a
function, so kinds share neither guards nor the limit of recompilations.

[Note: shapes] The first inputs of a model are compiled with their sizes as constants. When inputs of other sizes come,
one more function is compiled with variable sizes, for them and all later ones. The first sizes keep their own code, so
the numbers of a call do not depend on which sizes came after its own. Functions belong to the process; which sizes are
constants for a model is part of its `Compiling`, so other models do not change its numbers.

[Note: random numbers in compiled code] On the CPU a mode passes the random stream of a layer to torch's operations
(TorchDraws in runtime/rng), and torch.compile does not work inside of such a mode. The mode is left before compiled
code begins and entered again around the operations of that code. With inductor's option `fallback_random`, which is on
unless the user turns it off, these draw the numbers that the eager layer draws.

[Note: guards] Before compiled code runs, torch checks whether it fits. Two threads that check the same code at the same
time disturb each other: the check fails, and torch compiles once more, until its limit is reached. So a lock is held
from the call to the first operation of the compiled code.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from roundpipe.compiled.options import CompileOptions
from roundpipe.errors import ConfigError

logger = logging.getLogger("roundpipe")
T = TypeVar("T")
MOST_SHAPES = 4  # sizes of inputs of one class with which layers are rehearsed
_MOST_KINDS = 32  # kinds that a module had under different settings, of which a part keeps the last ones
_Mode = Callable[[], TorchDispatchMode | None]

COMPILING = threading.RLock()  # held while torch.compile may trace: [Note: guards], [Note: rehearsals] in `rehearsals`
_RETRY_S = 0.01
_local = threading.local()  # `mode`: that which compiled code on this thread enters again; `in_guards`: [Note: guards]


class Compilations(NamedTuple):
    """What this process has compiled: the number of graphs, and the seconds of the rehearsals that compiled them."""

    graphs: int = 0
    seconds: float = 0.0


_done = [Compilations()]


def compilations() -> Compilations:
    """What this process has compiled so far."""
    return _done[0]


def add_seconds(seconds: float) -> None:
    """Count the time of a rehearsal that has compiled graphs. Called under COMPILING."""
    _done[0] = _done[0]._replace(seconds=_done[0].seconds + seconds)


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


class _Backend:
    """The backend of a CompileOptions, which counts what it compiles; see [Note: random numbers in compiled code]."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled = self._compile(graph, inputs)
        _done[0] = _done[0]._replace(graphs=_done[0].graphs + 1)

        def run(*args: Any) -> Any:
            _end_of_guards()
            mode = getattr(_local, "mode", None)
            if mode is None:
                return compiled(*args)
            with mode:
                return compiled(*args)

        return run

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        backend, mode, options = self._options.backend, self._options.mode, dict(self._options.options)
        if backend == "inductor":
            from torch._inductor import list_mode_options
            from torch._inductor.compile_fx import compile_fx

            patches = {"fallback_random": True, **{name.replace("-", "_"): value for name, value in options.items()}}
            if mode is not None and mode != "default":
                patches |= list_mode_options(mode)
            return cast("Callable[..., Any]", compile_fx(graph, inputs, config_patches=patches))
        arguments = {name: value for name, value in (("mode", mode), ("options", options)) if value}
        made = torch._dynamo.lookup_backend(backend)(graph, inputs, **arguments)
        return cast("Callable[..., Any]", made)


Classes = tuple[Hashable, ...]


class Form(NamedTuple):
    """What decides which code serves inputs: the class of their tensors, and the sizes."""

    class_: Classes  # grad mode, dtypes and numbers of dimensions
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        class_ = (torch.is_grad_enabled(), *((each.dtype, each.dim()) for each in tensors))
        return cls(class_, tuple(tuple(each.shape) for each in tensors))


class _Code:
    """One function for torch.compile, with a copy for each device, so that devices do not share one limit."""

    def __init__(self, options: CompileOptions, *, dynamic: bool) -> None:
        self._options, self._dynamic = options, dynamic
        self._of_device: dict[torch.device, tuple[types.CodeType, Callable[..., Any]]] = {}

    def on(self, device: torch.device) -> Callable[..., Any]:
        known = self._of_device.get(device)
        if known is None:
            with COMPILING:
                known = self._of_device.setdefault(device, self._new())
        return known[1]

    def _new(self) -> tuple[types.CodeType, Callable[..., Any]]:
        own = types.FunctionType(_run.__code__.replace(), _run.__globals__, _run.__name__)
        compiled = torch.compile(own, backend=_Backend(self._options), dynamic=self._dynamic, fullgraph=True)
        return own.__code__, compiled

    def num_graphs(self) -> int:
        """The number of graphs that torch keeps for this code."""
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
        return sum(len(entries(code)) for code, _ in self._of_device.values())


class _ShapeClass:
    """The code for inputs of one class; see [Note: shapes]."""

    def __init__(self) -> None:
        self.by_sizes: dict[tuple[tuple[int, ...], ...], _Code] = {}
        self.variable: _Code | None = None
        self.refuses_variable = False


class Constants:
    """The sizes that are constants in code of one model; see [Note: shapes]."""

    def __init__(self) -> None:
        self._forms: set[tuple[Kind, Form]] = set()

    def add(self, kind: Kind, form: Form) -> None:
        self._forms.add((kind, form))

    def include(self, kind: Kind, form: Form) -> bool:
        return (kind, form) in self._forms


class Kind:
    """Layers that share compiled code."""

    def __init__(self, name: str, options: CompileOptions) -> None:
        self.name, self.options = name, options
        self.reason: str | None = None  # why layers of this kind run eagerly; None: they do not
        self._classes: dict[Classes, _ShapeClass] = {}
        self._has_warned = False

    def code_for(self, form: Form, constants: Constants) -> _Code | None:
        """The code for inputs of a form; None if they run eagerly."""
        shapes = None if self.reason is not None else self._classes.get(form.class_)
        if shapes is None:
            return None
        code = shapes.by_sizes[form.sizes] if constants.include(self, form) else shapes.variable
        if code is None and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: inputs of further sizes run eagerly: %d are compiled", self.name, MOST_SHAPES)
        return code

    def admit(self, form: Form, order: int, constants: Constants) -> None:
        """Provide code for inputs of a form. Called in rehearsals alone, under COMPILING; order: see `Rehearsal`."""
        shapes = self._classes.setdefault(form.class_, _ShapeClass())
        if self.reason is not None or constants.include(self, form):
            return
        dynamic = self.options.dynamic
        if dynamic is True or (dynamic is None and order and not shapes.refuses_variable):
            shapes.variable = shapes.variable or _Code(self.options, dynamic=True)
            return
        if order >= MOST_SHAPES:
            return
        if form.sizes not in shapes.by_sizes:
            shapes.by_sizes[form.sizes] = _Code(self.options, dynamic=False)
        constants.add(self, form)

    def give_up(self, error: BaseException) -> None:
        """Run layers of this kind eagerly from now on, after `error` in their compilation."""
        if self.options.fullgraph:
            raise ConfigError(
                f"{self.name} cannot be compiled in one graph, which compile=dict(fullgraph=True) demands; without it "
                f"such layers run eagerly: {_brief(error)}"
            ) from error
        with COMPILING:
            if self._try_without_variable_sizes() or self.reason is not None:
                return
            self.reason = _brief(error)
            logger.warning("%s runs eagerly, because it cannot be compiled: %s", self.name, self.reason)

    def _try_without_variable_sizes(self) -> bool:
        """Drop code with variable sizes, which may be at fault; returns whether there was some."""
        for shapes in self._classes.values():
            if shapes.variable is not None and self.options.dynamic is None:
                shapes.variable, shapes.refuses_variable = None, True
                return True
        return False

    def num_graphs(self) -> int:
        """The number of graphs that torch keeps for this kind."""
        codes = [code for shapes in self._classes.values() for code in (*shapes.by_sizes.values(), shapes.variable)]
        return sum(code.num_graphs() for code in codes if code is not None)


def _brief(error: BaseException) -> str:
    """The first line of an error, and what it says of its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "BackendCompilerFailed":  # its first line only names the backend
        lines = lines[1:] or lines
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):  # names an argument that the user did not give
        limit = torch._dynamo.config.recompile_limit
        lines = [
            "values that differ from layer to layer, such as numbers in attributes, are constants in compiled code, of "
            f"which torch keeps {limit} variants (torch._dynamo.config.recompile_limit)"
        ]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_kinds: weakref.WeakValueDictionary[Hashable, Kind] = weakref.WeakValueDictionary()  # of the whole process


def kind_of(module: nn.Module, options: CompileOptions, device_type: str) -> Kind:
    """The kind of a module with its present flags and hooks."""
    key = options, device_type, _structure_of(module)
    try:
        with COMPILING:
            return _kinds.setdefault(key, Kind(type(module).__name__, options))
    except TypeError:  # options that cannot be hashed, such as a list: the kind is not shared
        return Kind(type(module).__name__, options)


def _structure_of(module: nn.Module) -> Hashable:
    parts = []
    for path, part in module.named_modules():
        hooks = tuple(
            (name, tuple(found.values()))
            for name, found in vars(part).items()
            if name.endswith("_hooks") and isinstance(found, dict) and found
        )
        forward = vars(part).get("forward")
        parts.append((path, type(part), part.training, hooks, getattr(forward, "__code__", None)))
    params = [
        (name, tuple(param.shape), param.dtype, param.requires_grad)
        for name, param in module.named_parameters(remove_duplicate=False)
    ]
    return tuple(parts), tuple(params)


class CompiledPart:
    """Calls a module of a layer, compiled or eagerly. nn.Module calls it in place of the module's forward and hooks."""

    def __init__(
        self, module: nn.Module, options: CompileOptions, device: torch.device, mode: _Mode, constants: Constants
    ) -> None:
        """mode: returns the mode in which operations draw random numbers on this thread, if there is one."""
        self._module, self._options, self._device, self._mode = module, options, device, mode
        self._kinds: dict[Hashable, Kind] = {}
        self.constants = constants
        self.kind: Kind | None = None  # None: the present task runs the module eagerly
        self.seen: list[Form] | None = None  # in the eager run of a rehearsal: the forms of inputs
        module.__dict__["_compiled_call_impl"] = self

    def bind(self, settings: Hashable, constants: Constants) -> None:
        """Choose the kind for the module's present flags and hooks, which `settings` names."""
        known = self._kinds.get(settings)
        if known is None:
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            known = self._kinds[settings] = kind_of(self._module, self._options, self._device.type)
        self.kind, self.constants = known, constants

    def unbind(self) -> None:
        """Run the module eagerly."""
        self.kind = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = self.kind
        if kind is None or kind.reason is not None:
            return self._module._call_impl(*args, **kwargs)
        form = Form.of(args, kwargs)
        if self.seen is not None:
            self.seen.append(form)
            return self._module._call_impl(*args, **kwargs)
        code, mode = kind.code_for(form, self.constants), self._mode()
        if code is None or (mode is not None and _get_current_dispatch_mode() is not mode):
            return self._module._call_impl(*args, **kwargs)
        function = code.on(self._device)
        try:
            with _left(mode):
                return _entered_alone(lambda: function(self._module, args, kwargs))
        except _errors_of_compilers() as error:
            kind.give_up(error)
        return self._module._call_impl(*args, **kwargs)


@contextlib.contextmanager
def _left(mode: TorchDispatchMode | None) -> Iterator[None]:
    """Leave the innermost mode. Compiled code enters it again."""
    if mode is None:
        yield
        return
    mode.__exit__(None, None, None)
    _local.mode = mode
    try:
        yield
    finally:
        _local.mode = None
        mode.__enter__()


def _entered_alone(call: Callable[[], T]) -> T:
    """Return `call()`, a call of compiled code: see [Note: guards]."""
    while True:
        COMPILING.acquire()
        _local.in_guards = True
        try:
            return call()
        except RuntimeError as error:
            if "symbolically trace" not in str(error):
                raise
        finally:
            _end_of_guards()
        time.sleep(_RETRY_S)  # user code, such as a compiled loss_fn, is being traced on another thread


def _end_of_guards() -> None:
    """Let other threads enter compiled code, if this thread has not done so yet."""
    if getattr(_local, "in_guards", False):
        _local.in_guards = False
        COMPILING.release()


def _errors_of_compilers() -> tuple[type[BaseException], ...]:
    """Exceptions that say that code could not be compiled; no layer raises them."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
