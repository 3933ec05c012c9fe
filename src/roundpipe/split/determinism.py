"""Lets modules run another forward for a while. They must be the caller's alone: copies, or a layer's on its device.

Things that are tried out: a trial that raises has the answer "no".

Used wherever a property of a model is found by running it. Interrupts and exhausted memory are no answers: they reach
the caller.

A mode in which dropout does nothing: calibration compares runs of a model that is in training mode.

Random numbers that a model draws from the process: Python's and numpy's generators, which all threads share.

Used by calibration, to find out, and by the layers of models that do so. Such a layer runs alone, on numbers of its own
that are derived from its torch stream: its recomputation draws the same, whatever other threads do.

A mode in which products with large half-precision matrices are computed in float32, a part of the matrix at a time.

Used by verification around backward passes on the host. Many CPUs have no instructions for half precision, and torch
then takes a hundred times as long for the product of a gradient and a weight as for that of an input and a weight.
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


def succeeds(what: str, trial: Callable[[], bool], *, passing: tuple[type[Exception], ...] = ()) -> bool:
    """The answer of a trial; False, and a line in the debug log, where it raises. `passing`: what the caller gets."""
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
    """Around an examination that a model need not stand: what it raises becomes a ModelSplitError."""
    try:
        yield
    except (ModelSplitError, *OUT_OF_MEMORY):
        raise
    except Exception as error:
        raise ModelSplitError(f"{what} raised {error!r}") from error


_ON_BY_DEFAULT = frozenset(("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"))
_DROPOUTS = _ON_BY_DEFAULT | {"alpha_dropout", "feature_alpha_dropout"}
_ATTENTION = "scaled_dot_product_attention"
_NOISE = "uniform_"  # of a router, say


class WithoutDropout(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False  # whether anything would have been dropped

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_random = drops(func, args, kwargs)
        self.was_needed = self.was_needed or is_random
        if name in _DROPOUTS:
            given = args[0] if args else kwargs["input"]
            # A tensor of its own wherever dropout would return one: which is which matters to the plan.
            return given.clone() if is_random and not _is_in_place(name, args, kwargs) else given
        if name == _NOISE:
            low, high = (*args[1:3], *(kwargs[key] for key in ("from", "to") if key in kwargs), 0.0, 1.0)[:2]
            return args[0].fill_((low + high) / 2)
        if name == _ATTENTION:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


def drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call would draw random numbers if it were not for `WithoutDropout`."""
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
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


_lock = process_rlock()


def state_of_generators() -> Any:
    """Equal to an earlier one if nobody has drawn since."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def fresh_generators() -> Any:
    """Put the generators into a state that nobody arrives at by himself. Only inside `own_generators`."""
    seed = random.getrandbits(31)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    return state_of_generators()


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Inside it this thread alone draws from the process's generators; they are as before when it is left."""
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


_TOP_K = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)
_MAX = (torch.max, torch.Tensor.max)


def _chooses(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns indices of what it has found to be large."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return func in _TOP_K or func in _ARGMAX or (func in _MAX and isinstance(dim, int))


class KeptRoutes(TorchFunctionMode):
    """Around one run of a block inside a layer."""

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
        """Once the block has run."""
        if self._recalled is None:
            save_for_recompute(*self._chosen)


def _top_k(indices: torch.Tensor, input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **more: Any) -> Any:
    return torch.return_types.topk((input.gather(dim, indices), indices))


def _max(indices: torch.Tensor, input: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    if keepdim:
        return torch.return_types.max((input.gather(dim, indices), indices))
    return torch.return_types.max((input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))


class ChoicesSeen(TorchFunctionMode):
    """Notes whether anything inside it chose so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or _chooses(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


Forward = Callable[..., Any]


@contextlib.contextmanager
def other_forwards(others: Iterable[tuple[nn.Module, Callable[[Forward], Forward]]]) -> Iterator[None]:
    """For each module what makes its other forward of its own."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module, other in others:
            own = module.__dict__
            before.append((own, own.get("forward")))
            own["forward"] = other(module.forward)
        yield
    finally:
        for own, forward in reversed(before):
            if forward is None:
                del own["forward"]
            else:
                own["forward"] = forward
