"""What holds for the tests of the command line."""

from helpers_trainers import no_report

__all__ = ["no_report"]
