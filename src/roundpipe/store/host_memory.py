"""How much host memory there is, and whether what is asked for fits.

Asked by the store and by optimizers before they take memory. Reads /proc and the control group; takes nothing itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from roundpipe.errors import ConfigError, HostMemoryError

logger = logging.getLogger("roundpipe")
CHECK_VARIABLE = "ROUNDPIPE_HOST_MEMORY_CHECK"
_REFUSE, _WARN, _OFF = _POLICIES = ("refuse", "warn", "off")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """What this process can still take without being killed; None where the system does not tell."""
    limits = [value for value in (_meminfo_available(), _cgroup_available()) if value is not None]
    return min(limits) if limits else None


def require_host_memory(
    needs: Mapping[str, int], what: str, advice: str, *, async_needs: Mapping[str, int] = {}, async_advice: str = ""
) -> None:
    """Refuse with a table when the sum of `needs` (bytes) exceeds what is available.

    async_needs: what asynchronous steps take on top. If only that does not fit, the table is logged as a warning.
    """
    policy = _policy()
    available = None if policy == _OFF else available_host_bytes()
    total = sum(needs.values())
    total_async = total + sum(async_needs.values())
    if available is None or total_async <= available:
        return
    rows = {name: value for name, value in needs.items() if value} | {"needed in all": total}
    if async_needs:
        rows |= {**async_needs, "needed in all, asynchronous steps": total_async}
    if total <= available:
        table = memory_table({**rows, "available": available, "missing": total_async - available})
        logger.warning("%s with asynchronous steps does not fit into host memory:\n%s\n%s", what, table, async_advice)
        return
    table = memory_table({**rows, "available": available, "missing": total - available})
    message = f"{what} does not fit into host memory:\n{table}\n{advice}"
    if policy == _WARN:
        logger.warning("%s", message)
        return
    raise HostMemoryError(
        f"{message} If this counts memory that you do not need, set {CHECK_VARIABLE}=warn (or off) in the environment."
    )


def memory_table(rows: Mapping[str, int]) -> str:
    """Names and bytes, one pair a line."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value / 1e9:12.3f} GB" for name, value in rows.items())


def _policy() -> str:
    policy = os.environ.get(CHECK_VARIABLE) or _REFUSE
    if policy not in _POLICIES:
        raise ConfigError(f"{CHECK_VARIABLE}={policy!r} is unknown; give one of {', '.join(_POLICIES)}, or unset it.")
    return policy


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
