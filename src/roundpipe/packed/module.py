"""Modules whose frozen weights are packed: the same code, over weights that exist expanded only while they are used.

Packing changes the class of a module to a subclass of that class. A frozen parameter `weight` of the form nf4
becomes the parameter `weight_nf4`, a flat tensor of bytes, which moves and is saved like any frozen parameter. Reading
`module.weight` expands it.

[Note: expanded weights] While the module's forward runs, its weights are expanded once and read like parameters, so the
operations and their bits are those of the plain module. Autograd would keep an expanded weight for the backward pass.
A hook on what it saves keeps the packed bytes in its place, and expands the part that an operation has used again in
the backward pass. Outside of the forward a weight reads as a PackedTensor: shape, dtype and device cost nothing, any
operation gets the expanded values, and writes are refused, because they would be lost.

[Note: compiled modules] Compiled code has no such hooks: the compiler finds that backward needs what forward has
expanded, and keeps it. So a compiled linear module is one autograd function whose backward expands again. An operation
that the compiler cannot look into makes the bytes of backward depend on the gradient; otherwise the compiler would find
both expansions equal. Other packed modules, such as experts, run eagerly, with the layer that they are in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from roundpipe.context import is_trying_out
from roundpipe.errors import UsageError
from roundpipe.packed.forms import PackedWeight

_ATTRIBUTE = "_roundpipe_packed"  # of a packed module: PackedWeight by the name of the weight


class PackedModule(nn.Module):
    """What packed modules add to their class."""

    _roundpipe_packed: dict[str, PackedWeight]
    _packed_base: type[nn.Module]  # the class before packing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if type(self)._packed_base.forward is not nn.Linear.forward:
                torch._dynamo.graph_break()  # the layer runs eagerly: see [Note: compiled modules]
            given = args[0] if args else kwargs["input"]
            return _CompiledLinear.apply(given, _part(self, "weight"), self.bias, self._roundpipe_packed["weight"])
        with _Expansions(self):
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        packed = ", ".join(f"{name}={described.form.name}" for name, described in self._roundpipe_packed.items())
        return ", ".join(filter(None, (super().extra_repr(), packed)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so a pickle has the class before packing.
        return _empty_packed, (self._packed_base, tuple(self._roundpipe_packed)), self.__dict__


def part_name(name: str, described: PackedWeight) -> str:
    """The name of the parameter that holds the bytes of a packed weight."""
    return f"{name}_{described.form.name}"


def plain_state(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The state dict of a model with the values of packed weights under the names before packing; None if none is."""
    state, has_packed = model.state_dict(), False
    for path, module in model.named_modules():
        for name, described in getattr(module, _ATTRIBUTE, {}).items():
            place = f"{path}.{name}".removeprefix(".")
            part = state.pop(part_name(place, described))
            state[place], has_packed = described.expand(part).view(described.shape), True
    return state if has_packed else None


def install(module: nn.Module, packed: Mapping[str, tuple[PackedWeight, nn.Parameter]]) -> None:
    """Replace weights of a module by their packed bytes."""
    _define_operation()
    known: dict[str, PackedWeight] = dict(getattr(module, _ATTRIBUTE, {}))
    before = dict(module._parameters)
    module._parameters.clear()  # and filled again, in the same order: others may hold the dict
    for name, param in before.items():
        if name in packed:
            known[name], part = packed[name]
            module._parameters[part_name(name, known[name])] = part
        else:
            module._parameters[name] = param
    base: Any = getattr(module, "_packed_base", module.__class__)
    module.__dict__[_ATTRIBUTE] = known
    module.__class__ = _packed_class(base, tuple(known))


@functools.cache
def _packed_class(base: Any, names: tuple[str, ...]) -> Any:
    """A subclass of `base` and PackedModule, in which reading one of `names` reads the packed weight."""
    members: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    members.update(__module__=base.__module__, __doc__=base.__doc__, _packed_base=base)
    return type(f"Packed{base.__name__}", (PackedModule, base), members)


def _empty_packed(base: Any, names: tuple[str, ...]) -> nn.Module:
    cls: type[nn.Module] = _packed_class(base, names)
    return cls.__new__(cls)


def _part(module: PackedModule, name: str) -> torch.Tensor:
    part = module._parameters[part_name(name, module._roundpipe_packed[name])]
    assert part is not None
    return part


def _read(module: PackedModule, name: str) -> torch.Tensor:
    described, part = module._roundpipe_packed[name], _part(module, name)
    if torch.compiler.is_compiling():
        return described.expand(part).view(described.shape)
    current = _running.expansions
    if current is None or current.module is not module:
        return PackedTensor(described, part, name)
    if is_trying_out():
        return described.stand_in(part)
    return current.of(described, part)


# Weights while a forward runs.


class _Running(threading.local):
    """The innermost packed module whose forward runs on this thread."""

    expansions: _Expansions | None = None


_running = _Running()


class _Saved(NamedTuple):
    """What autograd keeps in place of a view of an expanded weight."""

    described: PackedWeight
    part: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Expansions:
    """The expanded weights of a module during one forward; see [Note: expanded weights]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._outer: _Expansions | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _expand_again)
        self._hooked = False
        # By address: it is unique, because the expanded weight lives as long as this object.
        self._weights: dict[int, tuple[PackedWeight, torch.Tensor, torch.Tensor]] = {}
        self._by_part: dict[int, torch.Tensor] = {}

    def __enter__(self) -> None:
        self._outer, _running.expansions = _running.expansions, self
        self._hooked = torch.is_grad_enabled()
        if self._hooked:
            self._hooks.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        if self._hooked:
            self._hooks.__exit__()
        _running.expansions = self._outer
        self._weights.clear()
        self._by_part.clear()

    def of(self, described: PackedWeight, part: torch.Tensor) -> torch.Tensor:
        found = self._by_part.get(id(part))
        if found is None:
            found = self._by_part[id(part)] = described.expand(part).view(described.shape)
            self._weights[found.untyped_storage().data_ptr()] = (described, part.detach(), found)
        return found

    def _keep(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        described, part, weight = self._weights.get(tensor.untyped_storage().data_ptr(), (None, None, None))
        if described is None or part is None or weight is None or tensor.dtype is not weight.dtype:
            return tensor
        return _Saved(described, part, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _expand_again(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        kept: torch.Tensor = saved
        return kept
    if 0 in saved.size:
        return torch.empty(saved.size, dtype=saved.described.dtype, device=saved.part.device)
    span = 1 + sum((size - 1) * step for size, step in zip(saved.size, saved.stride, strict=True))
    values = saved.described.expand(saved.part, saved.offset, saved.offset + span)
    return values.as_strided(saved.size, saved.stride)


# Weights in compiled code.


@functools.cache
def _define_operation() -> None:
    """Define the operation that copies packed bytes once a tensor is known. Called before anything can be compiled."""

    def again(part: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return part.clone()

    operation = torch.library.custom_op("roundpipe::again", again, mutates_args=())
    operation.register_fake(lambda part, after: torch.empty_like(part))


class _CompiledLinear(torch.autograd.Function):
    """nn.Linear with a packed weight; see [Note: compiled modules]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None, described: PackedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(part)
        ctx.described, ctx.dtype = described, x.dtype
        return nn.functional.linear(x, described.expand(part).view(described.shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (part,) = ctx.saved_tensors
        weight = ctx.described.expand(torch.ops.roundpipe.again(part, grad)).view(ctx.described.shape)
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return (grad @ weight.to(grad.dtype)).to(ctx.dtype), None, of_bias, None


# Weights outside of the forward.

_DESCRIBING = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_meta", "is_leaf")
} | {
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__")
}


class PackedTensor(torch.Tensor):
    """A packed weight as code outside of its module's forward reads it."""

    _described: PackedWeight
    _part: torch.Tensor
    _name: str

    @staticmethod
    def __new__(cls, described: PackedWeight, part: torch.Tensor, name: str) -> PackedTensor:
        made: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, described.shape, dtype=described.dtype, device=part.device
        )
        made._described, made._part, made._name = described, part, name
        return made

    def __init__(self, described: PackedWeight, part: torch.Tensor, name: str) -> None:
        pass

    def expanded(self) -> torch.Tensor:
        return self._described.expand(self._part).view(self._described.shape)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        first = args[0] if args else None
        if isinstance(first, cls) and _writes(func):
            raise UsageError(
                f"{first._name!r} is a frozen weight that is packed as {first._described.form.name}: code cannot write "
                "to it, and adapters cannot be merged into it. Save the adapter and merge it into the model in its "
                "original precision: roundpipe merge ADAPTER --out FOLDER."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIBING:
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(cls, cls.expanded, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map_only(cls, cls.expanded, args), **tree_map_only(cls, cls.expanded, kwargs or {}))


_READING = ("__int__", "__index__", "__invert__", "__iter__")  # the other names in __i...__ write


def _writes(func: Any) -> bool:
    name: str = func.__name__
    if name.endswith("__"):
        return name in ("__set__", "__setitem__") or (name.startswith("__i") and name not in _READING)
    return name.endswith("_")
