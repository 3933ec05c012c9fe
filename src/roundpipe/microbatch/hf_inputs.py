"""Splits the keyword arguments of a Hugging Face model into microbatches of whole samples.

Recognizes inputs by their names and shapes; reads token ids and numbers of codebooks from the model's config. Does not
know the type of the model and never imports transformers. Specs, positional arguments and packed data are left to
`roundpipe.microbatch.split`.

Most inputs have one row per sample. Others have one entry per item (image, video, audio clip; a sample has any number
of items), per part of an item, or per codebook:

    input_ids        [samples, tokens]       one row per sample
    image_grid_thw   [images, 3]             one entry per item
    pixel_values     [patches, features]     as many entries per item as its row of the grid says
    labels (Dia)     [samples * codebooks]   as many entries per sample as there are codebooks

[Note: placeholders] input_ids contain placeholder tokens for each kind of item. A model replaces the placeholders of a
kind by the features of the items of this kind, in order, sample after sample. So the items of a sample are those whose
features fill the sample's placeholders exactly. The number of placeholders per item is inferred in one of three ways:
it is proportional to the item's size in a table such as `image_grid_thw`, or an item has one unbroken run of
placeholders, or all items have the same number. An assignment of items to samples is used only if the items fill the
placeholders of every sample exactly. If the assignment is wrong nevertheless, transformers raises, because it compares
the numbers of features and placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any, NoReturn

import torch
from torch import Tensor

from roundpipe.errors import SplitError
from roundpipe.microbatch.specs import leaves_with_path, shown
from roundpipe.microbatch.split import CountedSplit, Rule, RuledTree, even_sizes

__all__ = ["ModelInputSplit", "split_model_inputs"]


@dataclass(frozen=True)
class Kind:
    """A kind of item, recognized by words in the names of its inputs."""

    name: str
    words: tuple[str, ...]
    token_type: int  # the value in mm_token_type_ids that marks the placeholders of this kind
    # A tensor with one entry per item has at most this many dimensions. A tensor with more has the layout
    # [samples, items, ...], where the items of each sample are padded to the same number.
    item_dims: int


# An input belongs to the first kind with a matching word: `image_sizes_videos` belongs to videos.
KINDS = (
    Kind("video", ("video", "second_per_grid"), 2, 5),
    Kind("audio", ("audio", "input_features", "feature_attention_mask"), 3, 5),
    Kind("image", ("image", "pixel_", "spatial_shapes", "target_sizes", "aspect_ratio", "local_patches"), 1, 4),
)
BATCH_NAMES = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "decoder_inputs_embeds")
CODEBOOK_NAMES = ("input_ids", "decoder_input_ids", "labels")
ITEM_COUNT_NAMES = ("images_per_sample", "batch_num_images")  # inputs with the number of items of each sample
# Inputs that every microbatch gets whole.
WHOLE_NAMES = ("cache_position", "logits_to_keep", "head_mask", "decoder_head_mask", "cross_attn_head_mask")
SIZE_WORDS = ("grid", "sizes", "shapes")  # words in the names of tables with the size of each item
# Words in the names of size tables in patches or tokens. The numbers in other size tables may be pixels.
PATCH_SIZE_WORDS = ("grid", "target", "embed")
ADVICE = "Say how to split this call with split_input=..., or run it with num_microbatch=1"


@dataclass(frozen=True)
class AxisSplit:
    """How many entries each microbatch gets along one dimension of a value."""

    sizes: tuple[int, ...]
    dim: int = 0

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def times(self, factor: int, dim: int = 0) -> AxisSplit:
        """Return the split of a value with `factor` times as many entries."""
        return AxisSplit(tuple(size * factor for size in self.sizes), dim)


@dataclass(frozen=True)
class Batch:
    """The keyword arguments of a call, its number of samples `size`, and how many samples each microbatch gets."""

    kwargs: Mapping[str, Any]
    config: Any
    size: int
    rows: AxisSplit

    def split_by(self, per_sample: Sequence[int]) -> AxisSplit:
        """Return the split of a value that has `per_sample[i]` entries for sample i."""
        return AxisSplit(tuple(sum(run) for run in _runs(per_sample, self.rows.sizes)))

    def refuse(self, name: str, value: Any, reason: str) -> NoReturn:
        """Raise a SplitError for one argument."""
        shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"with {len(value)} entries"
        raise SplitError(f"cannot split {name} {shape} beside a batch of {self.size}: {reason}. {ADVICE}")


@dataclass(frozen=True)
class Items:
    """How the items of one kind, and the parts of these items (such as patches), are split into microbatches."""

    whole: AxisSplit  # the split of a value with one entry per item
    # Splits of values with one entry per part of an item. A key is the name of the input that has the number of parts
    # of each item.
    parts: Mapping[str, AxisSplit]

    def split_of(self, name: str, value: Any) -> AxisSplit | None:
        """Return the split of a value with one entry per item or per part of an item; None if it has neither."""
        length = _length(value)
        if name == "pixel_values_local" and "num_local_patches" in self.parts:
            return self.parts["num_local_patches"]
        if length == self.whole.total:
            return self.whole
        for part in self.parts.values():
            if length == part.total:
                return part
            # Some models take all patches side by side in one wide picture, so the last dimension is split.
            is_wide = length == 1 and isinstance(value, Tensor) and name.startswith("pixel_values")
            if is_wide and part.total and value.shape[-1] % part.total == 0:
                return part.times(value.shape[-1] // part.total, dim=value.dim() - 1)
        return None


def split_model_inputs(kwargs: Mapping[str, Any], num_microbatch: int, config: Any) -> list[dict[str, Any]]:
    """Return the keyword arguments of min(batch size, num_microbatch) microbatches, split as evenly as tensor_split.

    `config` is the model's config, or None. A microbatch without any item of a kind has no inputs of that kind.
    """
    size = 1 if num_microbatch == 1 else _batch_size(kwargs)
    count = min(size, num_microbatch)
    if count <= 1:
        return [dict(kwargs)]
    batch = Batch(kwargs, config, size, AxisSplit(even_sizes(size, count)))
    items = {kind: found for kind in KINDS if (found := _find_items(kind, batch)) is not None}
    microbatches: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in kwargs.items():
        for microbatch, piece in zip(microbatches, _pieces(name, value, batch, items), strict=True):
            microbatch.update(piece)
    return microbatches


class ModelInputSplit(CountedSplit):
    """`split_model_inputs` as a split function; rows are samples."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.__qualname__ = split_model_inputs.__qualname__  # notes on exceptions show this name

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
        pieces = split_model_inputs(kwargs, num_microbatch, self._config)
        return [args] * len(pieces), pieces

    def batch_tensor(self, kwargs: Mapping[str, Any]) -> tuple[str, Tensor] | None:
        try:
            size = _batch_size(kwargs)
        except SplitError:  # one microbatch takes any inputs; for several, `split_model_inputs` raises it
            return None
        tensors = ((name, kwargs[name]) for name in (*BATCH_NAMES, *kwargs) if isinstance(kwargs.get(name), Tensor))
        return next(((name, tensor) for name, tensor in tensors if tensor.dim() > 0 and len(tensor) == size), None)

    def rows(self, kwargs: Mapping[str, Any], count: int) -> tuple[int, ...]:
        return (1,) if count == 1 else even_sizes(_batch_size(kwargs), count)


def _batch_size(kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples.

    With text inputs it is the smallest of their lengths, because some text inputs have one row per codebook. Without
    text inputs it is the number of items. If there are no size tables either, it is the common length of all tensors.
    """
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim() > 0}
    text = [len(tensors[name]) for name in BATCH_NAMES if name in tensors]
    if text:
        return min(text[:1] + [length for length in text if length > 1])
    tables = [len(table) for kind in KINDS for table in _size_tables(_members(kind, kwargs)).values()]
    lengths = set(tables) or {len(tensor) for tensor in tensors.values()} - {1}
    if len(lengths) > 1:
        shapes = ", ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise SplitError(f"cannot tell the batch size from {shapes}: their first dimensions differ. {ADVICE}")
    return max(lengths, default=1)


def _pieces(name: str, value: Any, batch: Batch, items: Mapping[Kind, Items]) -> list[dict[str, Any]]:
    """Return, for each microbatch, a dict with the argument `name`: the whole value or a piece of it.

    The dict is empty if the microbatch's piece is empty.
    """
    if not isinstance(value, Tensor) and not _has_entries(name, value, batch):
        return [{name: piece} for piece in _nested_pieces(name, value, batch)]
    if (split := _axis_split(name, value, batch, items)) is None:
        return [{name: value} for _ in batch.rows.sizes]
    is_tensor = isinstance(value, Tensor)
    pieces = torch.split(value, list(split.sizes), split.dim) if is_tensor else _runs(value, split.sizes)
    return [{name: piece} if size else {} for size, piece in zip(split.sizes, pieces, strict=True)]


def _has_entries(name: str, value: Any, batch: Batch) -> bool:
    """Return whether a list has one entry per sample or item, such as the boxes of each image.

    Any other list is a container of tensors, or an option such as `vision_feature_layer=[-2, -1]`.
    """
    if type(value) not in (list, tuple) or not value:
        return False
    if _kind_of(name) is not None:
        return True
    tensors = [leaf for _, leaf in leaves_with_path(value, name) if isinstance(leaf, Tensor)]
    if not tensors or len(value) != batch.size:
        return False
    says_so = name.endswith("labels") or all(isinstance(entry, Mapping) for entry in value)
    return says_so or any(_length(tensor) != batch.size for tensor in tensors)


def _nested_pieces(name: str, value: Any, batch: Batch) -> list[Any]:
    """Return one container per microbatch: tensors in the container are split by rows, other leaves are replicated."""
    tree = RuledTree.of(value, None, name)
    for leaf in tree.leaves:
        if leaf.rule is Rule.PACKED or (leaf.rule is Rule.AUTO and leaf.size not in (1, batch.size)):
            batch.refuse(leaf.path, leaf.value, "it has no entry per sample")
    return tree.split(len(batch.rows.sizes))


def _axis_split(name: str, value: Any, batch: Batch, items: Mapping[Kind, Items]) -> AxisSplit | None:
    """Return how to split a tensor or list; None if every microbatch gets the whole value."""
    length = _length(value)
    if length is None or name in WHOLE_NAMES:
        return None
    if name.startswith("cu_seq"):
        batch.refuse(name, value, "it marks the samples of a packed sequence, not of rows")
    has_axes = name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3  # shape [3, samples, tokens]
    if has_axes and value.shape[1] in (1, batch.size):
        return None if value.shape[1] == 1 else batch.rows.times(1, dim=1)
    kind = _kind_of(name)
    if kind is not None and kind in items and (split := items[kind].split_of(name, value)):
        return split
    if length == batch.size:
        return batch.rows
    if name in CODEBOOK_NAMES and length in (batch.size * number for number in _codebooks(batch.config)):
        return batch.rows.times(length // batch.size)
    if length == 1:
        return None
    # The name does not show the kind of item. Split by items only if the length matches the items of exactly one split.
    splits = {split for found in items.values() if kind is None and (split := found.split_of(name, value))}
    if len(splits) != 1:
        known = ["samples", *(f"the {found.whole.total} {kind.name}(s)" for kind, found in items.items())]
        batch.refuse(name, value, f"it is not known whether it has an entry for each of the {' or '.join(known)}")
    return splits.pop()


def _find_items(kind: Kind, batch: Batch) -> Items | None:
    """Return the split of the items of a kind; None if there are none, or if one item serves every sample."""
    members = _members(kind, batch.kwargs)
    if not members:
        return None
    tables = _size_tables(members)
    lengths = {len(member) for name, member in (tables or members).items() if name != "pixel_values_local"}
    num_items = max(lengths - {batch.size}, default=batch.size)
    mask = _placeholders(kind, batch)
    if num_items == 1 and mask is None:
        return None
    per_sample = _items_per_sample(kind, num_items, mask, batch)
    if per_sample is None:
        name = next(iter(tables or members))
        where = "none is in input_ids (going by the config) or mm_token_type_ids"
        tokens = where if mask is None else f"the samples have {shown(mask.sum(1).tolist())}"
        reason = f"{kind.name} placeholder tokens must say to which sample each of {num_items} belongs, but {tokens}"
        batch.refuse(name, members[name], reason)
    parts = {name: _extents(table) for name, table in tables.items() if _has(name, PATCH_SIZE_WORDS)}
    if "num_local_patches" in members:
        parts["num_local_patches"] = [int(number) for number in members["num_local_patches"]]
    splits = {name: batch.split_by([sum(run) for run in _runs(counts, per_sample)]) for name, counts in parts.items()}
    return Items(batch.split_by(per_sample), splits)


def _items_per_sample(kind: Kind, num_items: int, mask: Tensor | None, batch: Batch) -> Sequence[int] | None:
    """Return the number of items of each sample; None if it cannot be determined. See [Note: placeholders]."""
    for name in ITEM_COUNT_NAMES:
        if kind.name in name and name in batch.kwargs and sum(batch.kwargs[name]) == num_items:
            return [int(number) for number in batch.kwargs[name]]
    members = _members(kind, batch.kwargs)
    num_dims = max((member.dim() for member in members.values() if isinstance(member, Tensor)), default=0)
    has_padding = num_dims > kind.item_dims and not _size_tables(members)
    # If there are as many items as samples, and every sample has a placeholder, each sample has exactly one item.
    if num_items == batch.size and (mask is None or mask.any(1).all() or has_padding):
        return [1] * batch.size
    if mask is None:
        return [0] * batch.size if num_items == 0 else None
    return next((found for found in _assignments(members, mask, num_items) if found is not None), None)


def _assignments(members: Mapping[str, Any], mask: Tensor, num_items: int) -> Iterator[Sequence[int] | None]:
    """Yield possible numbers of items per sample, the most reliable first. Yields None where a method fails.

    mask: marks the placeholders in the tokens of each sample.
    """
    tokens = mask.sum(1).tolist()
    # The number of unbroken runs of placeholders. A run starts where the token before is not a placeholder.
    num_runs = (mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)).tolist()
    merge_sizes = [int(size) for name in members if name.endswith("merge_sizes") for size in members[name]]
    weights = {
        name: [extent // size**2 for extent, size in zip(_extents(table), merge_sizes or repeat(1), strict=False)]
        for name, table in _size_tables(members).items()
        if len(table) == num_items
    }
    yield from (_deal(tokens, weights[name]) for name in weights if _has(name, PATCH_SIZE_WORDS))
    yield num_runs if sum(num_runs) == num_items else None
    yield from (_deal(tokens, weights[name]) for name in weights if not _has(name, PATCH_SIZE_WORDS))
    yield _deal(tokens, [1] * num_items)


def _deal(tokens: Sequence[int], weights: Sequence[int]) -> list[int] | None:
    """Return the number of items of each sample if the number of an item's tokens is proportional to its weight.

    tokens: the number of placeholder tokens of each sample. weights: the weight of each item.
    Returns None if an item would have a fraction of a token, or if its tokens would extend over two samples.
    """
    num_tokens, weight = sum(tokens), sum(weights)
    if not weight or any(item * num_tokens % weight for item in weights):
        return None
    items_before = {end * num_tokens // weight: count for count, end in enumerate(accumulate(weights, initial=0))}
    ends = list(accumulate(tokens, initial=0))
    if not all(end in items_before for end in ends):
        return None
    return [items_before[end] - items_before[start] for start, end in pairwise(ends)]


def _placeholders(kind: Kind, batch: Batch) -> Tensor | None:
    """Return a mask of the placeholder tokens of a kind; None if there are none or they cannot be recognized."""
    ids, types = batch.kwargs.get("input_ids"), batch.kwargs.get("mm_token_type_ids")
    masks = []
    if isinstance(ids, Tensor):
        masks.append(torch.isin(ids, torch.tensor(_token_ids(kind, batch.config), dtype=ids.dtype, device=ids.device)))
    if isinstance(types, Tensor):
        masks.append(types == kind.token_type)
    fitting = [mask.flatten(1) for mask in masks if mask.dim() > 1 and len(mask) == batch.size and mask.any()]
    return fitting[0] if fitting else None


def _token_ids(kind: Kind, config: Any) -> list[int]:
    """Return the ids of the placeholder tokens, from the config or from the first sub-config that has them."""
    for part in (config, *getattr(config, "__dict__", {}).values()):
        values = [getattr(part, f"{kind.name}_token_{ending}", None) for ending in ("id", "index")]
        if found := [value for value in values if isinstance(value, int)]:
            return found
    return []


def _members(kind: Kind, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that belong to a kind."""
    return {name: value for name, value in kwargs.items() if _kind_of(name) is kind and _length(value) is not None}


def _kind_of(name: str) -> Kind | None:
    """Return the kind of item that an input's name belongs to; None for other inputs."""
    return None if name in ITEM_COUNT_NAMES else next((kind for kind in KINDS if _has(name, kind.words)), None)


def _size_tables(members: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the size tables: tensors that have, per item, a number, (height, width) or (time, height, width)."""
    return {
        name: value
        for name, value in members.items()
        if _has(name, SIZE_WORDS) and not name.endswith("merge_sizes")
        if isinstance(value, Tensor) and not value.is_floating_point()
        if value.dim() == 1 or (value.dim() == 2 and value.shape[1] in (2, 3))
    }


def _extents(table: Tensor) -> list[int]:
    """Return the product of each row of a size table."""
    return [int(extent) for extent in table.reshape(len(table), -1).prod(1).tolist()]


def _codebooks(config: Any) -> list[int]:
    """Return the numbers of codebooks in the config: an audio sample may have one row per codebook."""
    decoders = [getattr(config, name, None) for name in ("decoder", "decoder_config")]
    numbers = [getattr(part, name, None) for part in decoders for name in ("num_codebooks", "num_channels")]
    return [number for number in (getattr(config, "num_codebooks", None), *numbers) if isinstance(number, int)]


def _has(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)


def _length(value: Any) -> int | None:
    """Return the number of entries of a tensor (along its first dimension) or list; None for other values."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() > 0 else None
    return len(value) if type(value) in (list, tuple) else None


def _runs(values: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    """Return consecutive slices of `values` with the given sizes."""
    return [values[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
