"""RoundPipeORPOTrainer. TRL keeps its trainer among its experiments, which may change or go with any release."""

from __future__ import annotations

from trl.experimental.orpo import ORPOTrainer

from roundpipe.integrations.trainer import RoundPipeMixin


class RoundPipeORPOTrainer(RoundPipeMixin, ORPOTrainer):  # type: ignore[misc]
    """TRL's ORPOTrainer over a RoundPipe."""
