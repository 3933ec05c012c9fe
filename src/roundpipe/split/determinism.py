"""Controlled runs of a model: makes forward passes comparable and repeatable, and turns failures into results.

Calibration compares runs of one model, so dropout must be off and random numbers the same. A layer's recomputation must
draw the same random numbers and choose the same experts as its forward pass.
Knows torch modes, generators and modules: no plans.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe.context import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.errors import ModelSplitError
from roundpipe.monitor import process_rlock

logger = logging.getLogger("roundpipe")
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
Forward = Callable[..., Any]


# Trials. Interrupts and out-of-memory errors say nothing about the model, so they are always re-raised.


def succeeds(what: str, trial: Callable[[], bool], *, passing: tuple[type[Exception], ...] = ()) -> bool:
    """Return the result of `trial`, or False if it raises; the exception is logged at debug level.

    what: the statement that `trial` tests, for the log. passing: types of exceptions that are re-raised.
    """
    try:
        return trial()
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        if isinstance(error, passing):
            raise
        logger.debug("%s: no, trying it out raised %r", what, error)
        return False


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn exceptions inside the `with` block into a ModelSplitError. what: names the operation in the message."""
    try:
        yield
    except (ModelSplitError, *OUT_OF_MEMORY):
        raise
    except Exception as error:
        raise ModelSplitError(f"{what} raised {error!r}") from error


@contextlib.contextmanager
def other_forwards(others: Iterable[tuple[nn.Module, Callable[[Forward], Forward]]]) -> Iterator[None]:
    """Replace the forwards of modules while entered.

    others: pairs of a module and a function that takes the old forward and returns the new one.
    The modules are changed, so no other thread may use them meanwhile.
    """
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module, other in others:
            own = module.__dict__
            before.append((own, own.get("forward")))
            own["forward"] = other(module.forward)
        yield
    finally:
        # Restore in reverse order: if a module occurs twice, its first entry has the original forward.
        for own, forward in reversed(before):
            if forward is None:
                del own["forward"]
            else:
                own["forward"] = forward


# Turning dropout and other noise off.

_ON_BY_DEFAULT = frozenset(("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"))
_DROPOUTS = _ON_BY_DEFAULT | {"alpha_dropout", "feature_alpha_dropout"}
_ATTENTION = "scaled_dot_product_attention"
_NOISE = "uniform_"  # the torch function that draws noise, for example the jitter of a router


class WithoutDropout(TorchFunctionMode):
    """Turns off dropout and uniform noise in a model that is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False  # whether any call would have drawn random numbers without this mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_random = drops(func, args, kwargs)
        self.was_needed = self.was_needed or is_random
        if name in _DROPOUTS:
            given = args[0] if args else kwargs["input"]
            # Return a new tensor object wherever dropout would: the plan depends on which tensors are the same object.
            return given.clone() if is_random and not _is_in_place(name, args, kwargs) else given
        if name == _NOISE and args:  # torch.nn.init has a function of this name, which gets here without args
            low, high = (*args[1:3], *(kwargs[key] for key in ("from", "to") if key in kwargs), 0.0, 1.0)[:2]
            return args[0].fill_((low + high) / 2)
        if name == _ATTENTION:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


def drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers that `WithoutDropout` turns off."""
    name = getattr(func, "__name__", "")
    if name == _ATTENTION:
        return bool(_argument(args, kwargs, 4, 0.0, "dropout_p") > 0.0)
    if name in _DROPOUTS:
        is_on = _argument(args, kwargs, 2, name in _ON_BY_DEFAULT, "training", "train")
        return bool(is_on and _argument(args, kwargs, 1, 0.5, "p") > 0.0)
    return name == _NOISE


def _is_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return name.endswith("_") or bool(_argument(args, kwargs, 3, False, "inplace"))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: Any, *names: str) -> Any:
    """Return an argument given by position or by one of its names, or its default."""
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


# Random numbers from Python's and numpy's global generators, which all threads of the process share.

_lock = process_rlock()  # held by the thread that may draw from these generators


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Give this thread exclusive use of the global generators; restores their state at the end.

    Seeds the global generators from torch's generator. A recomputation with the same torch seed therefore draws the
    same numbers, whatever other threads draw.
    """
    numpy = sys.modules.get("numpy")
    with _lock:
        python_state = random.getstate()
        numpy_state = numpy.random.get_state() if numpy is not None else None
        seed = int(torch.randint(2**31, ()))
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def fresh_generators() -> Any:
    """Reseed the global generators and return their state. May be called only inside `own_generators`.

    If `state_of_generators` returns the same state later, no random number was drawn and no fixed seed was set.
    """
    seed = random.getrandbits(31)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    return state_of_generators()


def state_of_generators() -> Any:
    """Return the state of the global generators, which can be compared with `==`."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


# Choices of a router. Sums on a GPU may differ in the last bit when they are repeated. If two experts have nearly equal
# scores, the last bit decides. A recomputation must send each token to the experts that the forward pass chose.

_TOP_K = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)
_MAX = (torch.max, torch.Tensor.max)


class KeptRoutes(TorchFunctionMode):
    """Repeats the choices of a block's router: forward saves the indices of each top-k, argmax and max along a dim.

    In the recomputation of the block, the same calls return the saved indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recalled = iter(get_recompute_data()) if doing_recompute() else None
        self._chosen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _chooses(func, args, kwargs):
            return func(*args, **kwargs)
        if self._recalled is None:
            found = func(*args, **kwargs)
            self._chosen.append((found if func in _ARGMAX else found.indices).detach())
            return found
        indices = next(self._recalled)
        if func in _ARGMAX:
            return indices
        return _top_k(indices, *args, **kwargs) if func in _TOP_K else _max(indices, *args, **kwargs)

    def save(self) -> None:
        """Save the choices of a forward pass for its recomputation. Must be called after the block's forward."""
        if self._recalled is None:
            save_for_recompute(*self._chosen)


class ChoicesSeen(TorchFunctionMode):
    """Sets `seen` to True if any top-k, argmax or max along a dimension is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or _chooses(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _chooses(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns the indices of the largest values."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return func in _TOP_K or func in _ARGMAX or (func in _MAX and isinstance(dim, int))


def _top_k(indices: torch.Tensor, input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **more: Any) -> Any:
    """Return what torch.topk returns if it chooses `indices`."""
    return torch.return_types.topk((input.gather(dim, indices), indices))


def _max(indices: torch.Tensor, input: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return what torch.max along a dimension returns if it chooses `indices`."""
    if keepdim:
        return torch.return_types.max((input.gather(dim, indices), indices))
    return torch.return_types.max((input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))
