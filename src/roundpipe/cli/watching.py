"""What a run shows of itself beside its training: its title, the services that it reports to, and early stopping."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from roundpipe.cli.arguments import TrainSettings, merge_command
from roundpipe.cli.methods import Head
from roundpipe.errors import ConfigError

# What to install for --report-to, where the package has another name than the service.
_PACKAGES = {"comet_ml": "comet-ml", "azure_ml": "azureml-mlflow", "dagshub": "dagshub mlflow", "flyte": "flytekit"}


def check_reporting(names: list[str]) -> None:
    """Raise ConfigError for services of --report-to that are unknown, or whose packages are not installed."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    available = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(
                f"--report-to {name} is unknown; give one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
            )
        if name not in available:
            raise ConfigError(
                f"--report-to {name}: its package is not installed here; run: pip install "
                f"{_PACKAGES.get(name, name)}. Or leave the option out, or use one that is installed: "
                f"{', '.join(available) or 'there is none'}."
            )


def about(settings: TrainSettings) -> dict[str, Any]:
    """What a run is: the first section of its report, which also gives it its title."""
    if settings.adapter is not None:
        trained = f"LoRA adapter {settings.adapter.name}, trained further"
    else:
        trained = "all weights" if settings.lora is None else f"LoRA, rank {settings.lora.rank}"
    shown: dict[str, Any] = {
        "name": settings.trainer.get("run_name") or settings.out.absolute().name,
        "base model": Path(settings.model).name if Path(settings.model).exists() else settings.model,
        "method": f"{settings.method.title}, {trained}",
        "data": ", ".join(path.name if path.exists() else str(path) for path in settings.data),
    }
    if settings.price_per_hour is not None:
        shown["price per hour"] = settings.price_per_hour
    return shown


def early_stopping(settings: TrainSettings) -> list[Any]:
    """The callbacks that end a run whose evaluations do not get better."""
    from transformers import EarlyStoppingCallback

    return [] if settings.early_stopping is None else [EarlyStoppingCallback(settings.early_stopping)]


def how_it_stopped(settings: TrainSettings, state: Any) -> str | None:
    """The line that says which weights a run with early stopping has kept, and whether it has ended early."""
    if settings.early_stopping is None:
        return None
    if state.global_step >= state.max_steps:
        return f"the final model has the weights of step {state.best_global_step} (eval_loss {state.best_metric:.4g})"
    return (
        f"stopped early after step {state.global_step} of {state.max_steps}: the last {settings.early_stopping} "
        f"evaluations were not better than that of step {state.best_global_step} (eval_loss {state.best_metric:.4g}), "
        "whose weights the final model has"
    )


def what_next(settings: TrainSettings) -> str | None:
    """The commands that use the result of a run; None for models that do not answer."""
    if settings.method.head is not Head.TOKENS:
        return None
    chat = f"talk with it: {shlex.join(['roundpipe', 'chat', str(settings.out)])}"
    if settings.lora is None and settings.adapter is None:
        return chat
    return f"it is an adapter; merge it into its model: {merge_command(str(settings.out), 'MERGED')}; {chat}"
