"""Rows that a trainer reads one after the other: how far it has come, and how a resumed run finds the next rows.

Knows the interface of Trainer and of iterable datasets, nothing of layers and steps.

[Note: iterable data] Trainer computes from the step how many batches a resumed run skips. That is wrong once an
iterable dataset has ended and begun anew: the number of batches in a pass is not known. So a checkpoint has the number
of complete passes and of batches since then. A resumed run begins in the same pass, which sets the epoch of the dataset
and thereby its order, and reads the batches of that pass without training them. The states that the datasets library
keeps are not used: they lack the rows of shuffle buffers, and loaders read ahead.

A dataset that can go to a position itself (class SeekableRows) is not read from the beginning of its pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

_Base: Any = object  # for the type checker: the mixin has all methods of the class that it is put before


@runtime_checkable
class SeekableRows(Protocol):
    """An iterable dataset that never ends, and begins at any of its rows."""

    def position_at(self, num_rows: int) -> Any:
        """Where row number `num_rows` is. Not less than in the call before."""

    def go_to(self, position: Any) -> None:
        """Let the next iterator begin there."""


class IterableDataMixin(_Base):  # type: ignore[misc]
    """The part of a trainer that knows of iterable data: see [Note: iterable data]."""

    args: Any
    train_dataset: Any
    _passes = 0  # complete ones over the training data
    _batches = 0  # trained in this pass
    _rows = 0  # trained in all passes
    _resumes_at: tuple[int, int] | None = None  # passes and batches of the checkpoint, until its pass has begun
    _sought: Iterator[Any] | None = None  # batches from the position of a checkpoint on

    def values_of_data(self) -> dict[str, Any]:
        """What a checkpoint has of iterable data; nothing for other data."""
        dataset = self.train_dataset
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            return {}
        values: dict[str, Any] = {"passes": self._passes, "batches": self._batches, "rows": self._rows}
        if isinstance(dataset, SeekableRows):
            values["position"] = dataset.position_at(self._rows)
        return values

    def take_values_of_data(self, saved: Mapping[str, Any]) -> None:
        if not saved or self.args.ignore_data_skip:
            return
        self._resumes_at, self._rows = (saved["passes"], saved["batches"]), saved["rows"]
        if isinstance(self.train_dataset, SeekableRows) and "position" in saved:
            self.train_dataset.go_to(saved["position"])

    def run_pass(self, run: Any, options: dict[str, Any]) -> None:
        """Train one pass over the data: call `run`, Trainer's method for it, with its options."""
        at, epoch = self._resumes_at, options["epoch"]
        if at is not None and epoch < at[0]:
            return  # complete already
        self._passes, self._batches = epoch, 0
        if at is not None:
            self._resumes_at, self._batches = None, at[1]
            options = {**options, "epochs_trained": epoch, "steps_trained_in_current_epoch": at[1]}
            if isinstance(self.train_dataset, SeekableRows):
                self._sought = iter(options["train_dataloader"])
        try:
            run(**options)
        finally:
            self._sought = None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; takes the batches from the position of the checkpoint, not those that Trainer would skip to."""
        samples, num_items = super().get_batch_samples(self._sought or epoch_iterator, *args, **kwargs)
        self._batches += len(samples)
        self._rows += len(samples) * self.args.per_device_train_batch_size  # with the end of a pass, too many
        return samples, num_items
