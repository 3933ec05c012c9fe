"""Shows a training run: metrics, a live view in the terminal, a report with curves."""
