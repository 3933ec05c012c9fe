"""What holds for the tests of trainers."""

from helpers_trainers import no_report

__all__ = ["no_report"]
