"""What a master knows of its surroundings: where gradients come from, the model, the store and the other machines.

Interfaces only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from roundpipe.store.values import Share


class GradientSource(Protocol):
    """Provides the gradients of masters: LayerUpdate inside a step, HostGradients outside.

    `record` is the ParameterRecord of the copy, which `begin_step` or `begin_view` received together with the source.
    """

    def is_usable(self) -> bool:
        """Whether the calling thread may read gradients. Inside a step only the threads that run the step may."""

    @property
    def exchange(self) -> StepExchange | None:
        """The other machines; None if this machine is alone."""

    def gradient_of(self, record: Any) -> torch.Tensor | None:
        """The gradient in host memory, or None if there is none. Waits until it has landed. Valid until `release`.

        With several machines this is the sum over all of them, and all of them must ask for it.
        """

    def sources_of(self, record: Any) -> list[torch.Tensor] | None:
        """The tensors whose sum is the gradient, or None if there is none: alone, the gradient itself.

        With several machines there is one tensor for each machine that has a gradient, in the order of ranks. Each is
        flat and covers this machine's range (Share). All machines must ask for it.
        """

    def known_squares(self) -> dict[Any, float]:
        """The sums of squares of gradients, by record, to look up and to add to; empty if gradients may change."""

    def note_reading(self) -> None:
        """Called before code reads all gradients, as for a norm."""

    def release(self, record: Any) -> None:
        """Called when the copy does not need the gradient any more."""


class StepExchange(Protocol):
    """What gradients and updates need of the other machines. All machines call the same methods in the same order."""

    share: Share

    def numbers(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """The `values` of all machines, by rank. `what`: names the operation in errors."""

    def require_equal(self, what: str, values: Mapping[str, object], params: Sequence[str]) -> None:
        """Raise MachineError on all machines, with names and values, if the values of one machine differ.

        params: the names of the parameters that `what` concerns; their order must be the same on all machines, too.
        """

    def fetch(self, what: str, records: Sequence[Any], landed: Callable[[], Any], *, may_overwrite: bool) -> Any:
        """Begin to exchange gradients: `landed()` gives those of this machine, by record.

        The result, a Pending, has for each record the gradients of all machines in this machine's range.
        `may_overwrite`: the result may use the memory of this machine's gradients.
        """

    def gather(self, what: str, records: Sequence[Any], memories: Sequence[torch.Tensor]) -> Any:
        """Begin to fill dense tensors, in which this machine has written its range, with those of the others.

        records: the parameters of the tensors, in the same order on all machines.
        """


class GradientOwner(Protocol):
    """The model of a master. Outside steps it makes its copies show gradients."""

    def gradients_wanted(self, dropped: Container[int] = ()) -> None:
        """Call `begin_view` of all copies of the model, so that they show the gradients gathered since the last step.

        Does nothing inside a step, where copies have the gradients of the step. `dropped`: ids of copies whose
        gradients the caller drops next; those that earlier steps have left are dropped without being read.
        """

    def values_wanted(self, masters: Sequence[Any]) -> None:
        """Note that code outside of steps is about to use the values of masters, and may write them.

        Waits until no step writes them. The next call publishes what was written. Does nothing inside a step.
        """

    def wait_for_steps(self) -> bool:
        """Wait until all steps that were issued are done. Inside a step does nothing and returns False."""


class OpenStep(Protocol):
    """A step whose body runs on a thread of the user."""

    thread: int
    is_open: bool


class CopyHome(Protocol):
    """The store that made a copy."""

    gradient_owner: GradientOwner | None
    open_step: OpenStep | None  # the last step of an optimizer outside of step_fn, which may be open
    share: Share | None  # this machine's part of every copy, with several machines
    is_read_on_host: bool  # whether code on the host computes with the model's parameters

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that an optimizer adds a group with masters."""

    def wait_until_written(self, master: torch.Tensor) -> None:
        """Block until no checkpoint reads the values of the copy any more."""
