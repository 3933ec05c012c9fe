"""What the system tells about this machine and this process: cores, host memory, control group, pages, file systems.

The only file that reads them. Each function asks the system again, because limits and free memory change. A fact that
the system does not report is None. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_NODES = Path("/sys/devices/system/node")
_MOUNTS = Path("/proc/self/mountinfo")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


# Memory.


def total_host_bytes() -> int | None:
    """Bytes of memory that the machine has."""
    return _bytes_of_pages("SC_PHYS_PAGES")


def available_host_bytes() -> int | None:
    """Bytes that this process can still allocate without being killed; None if the system does not report them."""
    of_machine = _proc_bytes(_MEMINFO, "MemAvailable:")
    if of_machine is None:
        of_machine = _bytes_of_pages("SC_AVPHYS_PAGES")
    limits = [value for value in (of_machine, _cgroup_available()) if value is not None]
    return min(limits) if limits else None


def resident_bytes() -> int | None:
    """Bytes of memory that this process occupies."""
    return _proc_bytes(_STATUS, "VmRSS:")


def lock_limit_bytes() -> int | None:
    """The limit of locked memory of this process; None if it is unlimited or the system has no such limit."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages() -> str | None:
    """The setting for huge pages in use: always, madvise or never; None if the system has none."""
    try:
        found = re.search(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _proc_bytes(path: Path, key: str) -> int | None:
    """The value of a line such as `VmRSS:  1234 kB` in bytes; None if there is no such file or line."""
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in file if line.startswith(key)), None)
    except OSError:
        return None
    return None if line is None else int(line.split()[1]) * 1024


def _bytes_of_pages(name: str) -> int | None:
    """The number of pages that the system reports by this name, in bytes."""
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_available() -> int | None:
    """Bytes available in the control group (version 2 or 1); None if the group has no limit."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (_CGROUP / limit_name).read_text().strip()
            if limit == "max":
                return None
            return max(int(limit) - int((_CGROUP / usage_name).read_text()) + _reclaimable_bytes(), 0)
        except (OSError, ValueError):
            continue
    return None


def _reclaimable_bytes() -> int:
    """Bytes of cached file pages. The control group counts them as used, but the system frees them when needed."""
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            pairs = dict(line.split() for line in (_CGROUP / name).read_text().splitlines())
            return int(pairs.get("inactive_file", 0)) + int(pairs.get("active_file", 0))
        except (OSError, ValueError):
            continue
    return 0


# File systems.


def existing_part(path: Path) -> Path:
    """The path if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def file_system(path: Path) -> str | None:
    """The kind of the file system that has a path, or will have it, such as "ext4"; None if it is unknown."""
    place, found, depth = existing_part(path).resolve(), None, -1
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:  # a later mount at the same place hides the earlier one
        fields, _, rest = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4]))
        if (place == mount or mount in place.parents) and len(mount.parts) >= depth:
            found, depth = rest.split()[0], len(mount.parts)
    return found


def lies_in_memory(path: Path) -> bool:
    """Whether the files of a folder lie in host memory, as those of /dev/shm do."""
    return file_system(path) in MEMORY_FILE_SYSTEMS


# Cores.


def present_cores() -> int:
    """The number of CPU cores of the machine."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """The number of CPU cores that this process may run on."""
    return len(core_numbers())


def core_numbers() -> tuple[int, ...]:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(present_cores()))


def core_quota() -> float | None:
    """The number of cores that the control group (version 2 or 1) lets its processes fill; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((_CGROUP / name).read_text() for name in names).split()
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """The cores of each node; empty if the system does not report nodes."""
    nodes = {}
    for folder in _NODES.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            nodes[int(folder.name.removeprefix("node"))] = _numbers((folder / "cpulist").read_text())
    return dict(sorted(nodes.items()))


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3,8"."""
    found: list[int] = []
    for entry in filter(None, text.strip().split(",")):
        first, _, last = entry.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
