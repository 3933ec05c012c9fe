"""Shows training runs: metrics.jsonl, the live view of a terminal, and the report at the end.

Knows numbers, files and terminals. Knows no model, no Trainer and no device.
"""

from roundpipe.report.metrics import MetricsWriter, RunRecord, read_metrics

__all__ = ["MetricsWriter", "RunRecord", "read_metrics"]
