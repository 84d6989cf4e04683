"""What the probe makes of the system's files."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from localllm.daemon import machine

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_has_something_to_give() -> None:
    found = machine.probe()
    assert 0 < found.available_bytes < psutil.virtual_memory().total
    assert 1 <= found.num_cores <= (os.cpu_count() or 1)


def test_it_works_where_the_system_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no affinity, no cgroups."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine, "_own_cgroups", list)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if not logical else 8)
    found = machine.probe()
    assert found.num_cores == os.cpu_count()
    assert found.available_bytes > 0


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    cpus = write(tmp_path, siblings)
    assert machine._physical_cores(range(8), cpus) == 4
    assert machine._physical_cores([1, 5], cpus) == 1
    assert machine._physical_cores([20, 21], cpus) == 2


def test_affinity_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_affinity", lambda: {0})
    assert machine.num_cores() == 1


class TestCgroups:
    def test_a_path_is_followed_up_to_the_root(self, tmp_path: Path) -> None:
        membership = write(tmp_path, {"cgroup": "0::/system.slice/app\n"}) / "cgroup"
        root = tmp_path / "fs"
        assert machine._own_cgroups(root, membership) == [
            (2, root / "system.slice" / "app"),
            (2, root / "system.slice"),
            (2, root),
        ]

    def test_a_path_outside_of_the_namespace_leaves_the_root(self, tmp_path: Path) -> None:
        membership = write(tmp_path, {"cgroup": "0::/../../other\n"}) / "cgroup"
        assert machine._own_cgroups(tmp_path, membership)[-1] == (2, tmp_path)

    def test_version_1_has_a_tree_per_controller(self, tmp_path: Path) -> None:
        membership = write(tmp_path, {"cgroup": "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/\n"}) / "cgroup"
        assert machine._own_cgroups(tmp_path, membership) == [
            (1, tmp_path / "memory" / "box"),
            (1, tmp_path / "memory"),
            (1, tmp_path / "cpu"),
        ]

    def test_no_file_means_no_cgroups(self, tmp_path: Path) -> None:
        assert machine._own_cgroups(tmp_path, tmp_path / "none") == []

    @pytest.mark.parametrize(
        ("version", "limit", "usage", "prefix"),
        [(2, "memory.max", "memory.current", ""), (1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")],
    )
    def test_room_is_the_limit_less_what_cannot_be_reclaimed(
        self, tmp_path: Path, version: int, limit: str, usage: str, prefix: str
    ) -> None:
        statistics = f"{prefix}active_file {GIB}\n{prefix}inactive_file {GIB}\nanon 5\n"
        write(tmp_path, {limit: f"{8 * GIB}\n", usage: f"{3 * GIB}\n", "memory.stat": statistics})
        assert machine._cgroup_room([(version, tmp_path)]) == [7 * GIB]

    @pytest.mark.parametrize(
        ("version", "name", "text"), [(2, "memory.max", "max"), (1, "memory.limit_in_bytes", str(2**63 - 4096))]
    )
    def test_no_limit_is_no_limit(self, tmp_path: Path, version: int, name: str, text: str) -> None:
        write(tmp_path, {name: text, "memory.current": "5", "memory.usage_in_bytes": "5"})
        assert machine._cgroup_room([(version, tmp_path)]) == []

    @pytest.mark.parametrize(
        ("text", "quotas"),
        [("150000 100000", [1]), ("400000 100000", [4]), ("50000 100000", [0]), ("max 100000", []), ("", [])],
    )
    def test_quota_counts_whole_cores(self, tmp_path: Path, text: str, quotas: list[int]) -> None:
        write(tmp_path, {"cpu.max": text})
        assert machine._cgroup_quotas([(2, tmp_path)]) == quotas

    def test_quota_of_version_1(self, tmp_path: Path) -> None:
        write(tmp_path, {"a/cpu.cfs_quota_us": "200000", "a/cpu.cfs_period_us": "100000", "b/cpu.cfs_quota_us": "-1"})
        assert machine._cgroup_quotas([(1, tmp_path / "a"), (1, tmp_path / "b")]) == [2]

    def test_limits_bound_the_machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        write(tmp_path, {"memory.max": str(GIB), "memory.current": "0", "cpu.max": "50000 100000"})
        monkeypatch.setattr(machine, "_own_cgroups", lambda: [(2, tmp_path)])
        assert machine.probe() == machine.Machine(GIB - machine.HEADROOM_BYTES, 1)


def test_private_memory_of_a_process() -> None:
    assert 0 < machine.private_bytes(os.getpid()) <= psutil.Process().memory_info().rss
    assert machine.private_bytes(2**22 + 12345) == 0
