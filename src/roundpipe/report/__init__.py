"""Shows training runs: metrics.jsonl, the live view of a terminal, and the report at the end.

Knows numbers, files and terminals. Knows no model, no Trainer and no device.
"""

from roundpipe.report.charts import Curve
from roundpipe.report.metrics import MetricsWriter, RunRecord, read_metrics
from roundpipe.report.page import Section, write_report

__all__ = ["Curve", "MetricsWriter", "RunRecord", "Section", "read_metrics", "write_report"]
