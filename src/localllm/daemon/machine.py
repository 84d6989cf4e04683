"""What this machine, and the container around us, lets us use. The one probe that the memory estimates rest on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from localllm.daemon.contention import CpuTimes

CGROUPS = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
# Left to the rest of the system, the daemon itself and what the estimates miss.
HEADROOM_BYTES = 256 << 20
# Version 1 reports "no limit" as a number near 2^63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Machine:
    """`available_bytes` could be taken now without swapping; `num_cores` counts physical cores that we may use."""

    available_bytes: int
    num_cores: int


def probe() -> Machine:
    return Machine(available_bytes(), num_cores())


def available_bytes() -> int:
    """Free memory as the system and each enclosing cgroup see it, less a reserve."""
    limits = [psutil.virtual_memory().available, *_cgroup_room(_own_cgroups())]
    return max(0, min(limits) - HEADROOM_BYTES)


def num_cores() -> int:
    """Physical cores ∩ affinity ∩ cgroup quota, at least 1. Threads of one core would only wait for each other."""
    allowed = _affinity()
    cores = _physical_cores(allowed) if allowed else psutil.cpu_count(logical=False)
    return max(1, min([cores or os.cpu_count() or 1, *_cgroup_quotas(_own_cgroups())]))


def private_bytes(pid: int) -> int:
    """Memory that only this process holds: mapped model files count as available. 0 when it is gone."""
    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, info.rss - getattr(info, "shared", 0))


def cpu_times(pid: int) -> CpuTimes | None:
    """How the CPUs that we may use were spent so far; None when the process is gone."""
    try:
        own = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    allowed = _affinity()
    cpus = [times for cpu, times in enumerate(psutil.cpu_times(percpu=True)) if not allowed or cpu in allowed]
    idle = ("idle", "iowait", "guest", "guest_nice")
    busy = sum(seconds for times in cpus for kind, seconds in times._asdict().items() if kind not in idle)
    return CpuTimes(time.monotonic(), len(cpus), everybody=busy, runner=own.user + own.system)


def _affinity() -> set[int]:
    """Logical CPUs that this process may run on; empty where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def _physical_cores(allowed: Iterable[int], cpus: Path = CPUS) -> int:
    """How many different cores the logical CPUs belong to; each counts for itself where that is not known."""
    return len({_read(cpus / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed})


def _own_cgroups(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[tuple[int, Path]]:
    """(version, folder) of every cgroup around this process, innermost first. Empty outside Linux."""
    found = []
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += [(2, folder) for folder in _upwards(root, path)]
            continue
        for controller in controllers.split(","):
            if controller in ("memory", "cpu"):
                found += [(1, folder) for folder in _upwards(root / controller, path)]
    return found


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of `path` and its parents up to `root`. A path from outside our namespace leaves only the root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _cgroup_room(groups: Iterable[tuple[int, Path]]) -> list[int]:
    """Bytes below the memory limit of each group that has one. File pages are reclaimable and count as room."""
    rooms = []
    for version, folder in groups:
        limit = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        prefix = "" if version == 2 else "total_"
        statistics = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
        files = sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        rooms.append(limit - max(0, used - files))
    return rooms


def _cgroup_quotas(groups: Iterable[tuple[int, Path]]) -> list[int]:
    """Whole CPUs that each group with a limit may use: threads beyond the quota would be throttled."""
    quotas = []
    for version, folder in groups:
        if version == 2:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) // int(period))
    return quotas


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
