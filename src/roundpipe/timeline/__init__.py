"""What ran when, on which device: one type for measured and for simulated runs."""

from roundpipe.timeline.timeline import Span, Timeline

__all__ = ["Span", "Timeline"]
