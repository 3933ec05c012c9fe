"""The disks of a run of `roundpipe train`: whether its folders can be written, and what it writes into them.

Creates nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from roundpipe.cli.arguments import TrainSettings
from roundpipe.errors import ConfigError
from roundpipe.host_facts import existing_part, file_system, lies_in_memory

logger = logging.getLogger("roundpipe")
_STATE_OPTION, _WEIGHTS_OPTION = "--state-folder", "--weights-folder"


def check_writable(name: str, folder: Path) -> None:
    """Refuse a folder of this option that can be neither made nor written. Creates nothing."""
    existing = existing_part(folder)
    if folder.is_symlink() and existing != folder:
        target = os.readlink(folder)
        raise ConfigError(f"{name} {folder} is a link to {target}, which does not exist; make that folder.")
    if not existing.is_dir():
        raise ConfigError(f"{name} {folder}: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {folder}: no permission to write into {existing}.")


def check_scratch_folders(settings: TrainSettings) -> None:
    """Refuse folders for state and weights that can hold no files; warn of those whose files lie in host memory."""
    for name, folder in (
        (_STATE_OPTION, state_folder_of(settings)),
        (_WEIGHTS_OPTION, settings.weights_folder),
    ):
        if folder is None:
            continue
        check_writable(name, folder)
        if lies_in_memory(folder):
            logger.warning(
                "%s %s saves no memory: its files (%s) lie in host memory; give a folder on a disk",
                *(name, folder, file_system(folder)),
            )


def saves_memory(folder: Path | None) -> bool:
    """Whether what lies in this folder, if there is one, takes no host memory."""
    return folder is not None and not lies_in_memory(folder)


def state_folder_of(settings: TrainSettings) -> Path | None:
    given = settings.roundpipe.get("state_folder")
    return None if given is None else Path(given)


@dataclasses.dataclass(frozen=True)
class Disk:
    """What a run writes into folders on one disk. `folders`: as the user has given them."""

    folders: str
    parts: Mapping[str, int]
    free: int
    advice: str

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    def rows(self) -> dict[str, int]:
        return {**self.parts, "needed in all": self.needed, "free": self.free}


def disks_of(
    settings: TrainSettings, of_out: Mapping[str, int], of_state: Mapping[str, int], of_weights: Mapping[str, int]
) -> list[Disk]:
    """The disks of a run, each with all folders on it: for output, for the optimizer's state, for packed weights."""
    found: dict[int, Disk] = {}
    for name, folder, parts, advice in (
        (
            "--out",
            settings.out,
            of_out,
            "Free some space, give another --out, keep fewer checkpoints (--keep), or train with --lora R.",
        ),
        (_STATE_OPTION, state_folder_of(settings), of_state, f"Give another {_STATE_OPTION}, or --moments 8bit."),
        (_WEIGHTS_OPTION, settings.weights_folder, of_weights, f"Give another {_WEIGHTS_OPTION}."),
    ):
        if folder is None:
            continue
        shown, number = f"{name} {folder}", _disk_number(folder)
        known = found.get(number)
        if known is not None:
            shown, parts, advice = f"{known.folders} and {shown}", {**known.parts, **parts}, f"{known.advice} {advice}"
        found[number] = Disk(shown, parts, _free_bytes(folder), advice)
    return list(found.values())


def weights_to_write(settings: TrainSettings, num_bytes: int) -> dict[str, int]:
    """What the folder for packed weights still takes, by purpose. A file of the same model and form counts as written.

    If its source has changed, it is written anew after all, and a full disk is reported then.
    """
    folder, form = settings.weights_folder, settings.roundpipe.get("frozen_weights")
    if folder is None:
        return {}
    is_there = any(folder.glob(f"{Path(settings.model).resolve().name}-{form}-*"))
    return {"packed weights": 0 if is_there else num_bytes}


def _disk_number(folder: Path) -> int:
    return existing_part(folder).stat().st_dev


def _free_bytes(folder: Path) -> int:
    """Free bytes on the disk that has the folder, or will have it."""
    return shutil.disk_usage(existing_part(folder)).free
