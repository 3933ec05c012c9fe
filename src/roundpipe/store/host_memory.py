"""How much host memory there is, and whether what is asked for fits.

Asked by the store before it takes memory. Reads /proc and the control group; takes nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from roundpipe.errors import HostMemoryError

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """What this process can still take without being killed; None where the system does not tell."""
    limits = [value for value in (_meminfo_available(), _cgroup_available()) if value is not None]
    return min(limits) if limits else None


def require_host_memory(needs: Mapping[str, int], what: str, advice: str) -> None:
    """Refuse with a table when the sum of `needs` (bytes) exceeds what is available."""
    available = available_host_bytes()
    total = sum(needs.values())
    if available is None or total <= available:
        return
    rows = [*needs.items(), ("needed in all", total), ("available", available), ("missing", total - available)]
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {value / 1e9:12.3f} GB" for name, value in rows)
    raise HostMemoryError(f"{what} does not fit into host memory:\n{table}\n{advice}")


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_available() -> int | None:
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
    """File pages the kernel gives back under pressure; they count as used in the control group."""
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            pairs = dict(line.split() for line in (_CGROUP / name).read_text().splitlines())
            return int(pairs.get("inactive_file", 0)) + int(pairs.get("active_file", 0))
        except (OSError, ValueError):
            continue
    return 0
