"""What the caches of a generating call held before it, so that the call can be repeated after it has failed.

Blocks fill the caller's caches while they run. A call that fails in the middle leaves some layers of a cache filled,
and a repetition would fill these a second time.

[Note: giving a cache its content back] A copy of the content would double the memory of a cache, in a moment when
memory has run out. So an empty cache is emptied again, and a layer that only appends is cut back to its former length.
The content of any other layer can only be found unchanged or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.errors import add_note
from roundpipe.split.transformers import caches_in, holders_of, is_cache

_PLAIN = (int, float, bool, str, type(None))


class CacheContents:
    """The contents of all caches among the arguments of a call. Keeps none of their tensors alive."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = caches_in(tuple(args), kwargs)
        self._parts = [_Content(part) for cache in given for part in _parts_of(cache)]

    def restore(self, error: BaseException) -> bool:
        """Give the caches their contents back; returns whether all of them have it now. `error`: gets a note if not."""
        is_restored = False not in [part.restore() for part in self._parts]  # all of them, also after one that fails
        if not is_restored:
            add_note(error, "the call has changed its cache and was not repeated: begin with a new cache")
        return is_restored


def _parts_of(cache: Any) -> list[Any]:
    """A cache and the caches in it: that of an encoder-decoder model has two."""
    inside = [value for value in vars(cache).values() if is_cache(value)]
    return [cache, *(part for each in inside for part in _parts_of(each))]


class _Content:
    """The content of one cache, without the caches in it."""

    def __init__(self, cache: Any) -> None:
        self._layers: list[Any] | None = getattr(cache, "layers", None)
        self._num_layers = len(self._layers or ())
        own = holders_of(cache)
        if not any(_is_content(value) for holder in own for value in holder.values()):
            self._holders: list[_Holder] = [_EmptyHolder(holder) for holder in own]
            return
        growing = [vars(layer) for layer in self._layers or () if type(layer).__name__ == "DynamicLayer"]
        is_growing = {id(holder) for holder in growing}
        self._holders = [(_GrowingHolder if id(holder) in is_growing else _Holder)(holder) for holder in own]

    def restore(self) -> bool:
        if self._layers is not None:
            del self._layers[self._num_layers :]
        return False not in [holder.restore() for holder in self._holders]


class _Holder:
    """A dict with tensors of a cache, of which can only be found whether it has changed."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self._content = content
        self._seen = self._marks()

    def restore(self) -> bool:
        return self._marks() == self._seen

    def _marks(self) -> dict[Any, Any]:
        return {name: _mark(value) for name, value in self._content.items()}


class _EmptyHolder(_Holder):
    """A dict of an empty cache, whose tensors are empty or single numbers."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self._content = content
        self._values = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in content.items()}

    def restore(self) -> bool:
        self._content.clear()
        self._content.update(self._values)
        return True


class _GrowingHolder(_Holder):
    """The attributes of a layer that appends to its tensors along the dimension before the last, and changes no other.

    Its tensors may have moved to another device.
    """

    def restore(self) -> bool:
        for name, value in self._content.items():
            if isinstance(value, torch.Tensor) and name in self._seen:
                length = self._seen[name][1]
                if value.shape[-2] > length:
                    self._content[name] = value[..., :length, :]
        return self._marks() == self._seen

    def _marks(self) -> dict[Any, Any]:
        return {
            name: ("length", value.shape[-2]) if isinstance(value, torch.Tensor) else _mark(value)
            for name, value in self._content.items()
            if not isinstance(value, torch.device)
        }


def _is_content(value: Any) -> bool:
    """Whether a value of a cache is a tensor with states of tokens: those have several dimensions, counters do not."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.numel() > 0


def _mark(value: Any) -> Any:
    """A value that is equal later only if the given one has not changed."""
    if isinstance(value, torch.Tensor):
        # Tensors made in torch.inference_mode() do not count writes: they always count as changed.
        return (id(value), value.shape, object() if value.is_inference() else value._version)
    return value if isinstance(value, _PLAIN) else id(value)
