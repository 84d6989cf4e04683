"""How many threads a runner gets beside other programs."""

from __future__ import annotations

import os

import pytest

from localllm.daemon import machine
from localllm.daemon.contention import CpuTimes, SpareCpus


class Clock:
    """CPU times of a machine on which everybody computes as told."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._at = self._everybody = self._runner = 100.0
        self._spare = SpareCpus()

    def look(self, others: float, runner: float = 1.5, seconds: float = 1.0) -> int:
        """Others and the runner keep so many CPUs busy for so long; what the runner may have then."""
        self._at += seconds
        self._everybody += (others + runner) * seconds
        self._runner += runner * seconds
        return self._spare.observe(CpuTimes(self._at, self._num_cpus, self._everybody, self._runner))


def test_all_cpus_belong_to_a_runner_until_more_is_known() -> None:
    assert Clock(4).look(others=3.0) == 4


@pytest.mark.parametrize(
    ("num_cpus", "others", "spare"),
    [
        (2, 0.0, 2),
        (2, 0.3, 2),
        (2, 0.7, 1),
        (2, 1.0, 1),
        (2, 2.0, 1),
        (8, 1.2, 7),
        (8, 3.0, 5),
        (8, 8.0, 1),
        (2, -0.1, 2),
    ],
)
def test_what_others_use_for_long_is_theirs(num_cpus: int, others: float, spare: int) -> None:
    clock = Clock(num_cpus)
    assert [clock.look(others) for _ in range(6)][-1] == spare


def test_a_burst_of_a_second_changes_nothing() -> None:
    clock = Clock(2)
    for others in (0.0, 0.0, 2.0, 0.0, 0.0, 2.0, 0.0):
        assert clock.look(others) == 2


def test_cpus_come_back_when_others_have_been_quiet_for_a_while() -> None:
    clock = Clock(2)
    for _ in range(4):
        clock.look(others=1.0)
    assert [clock.look(others=0.0) for _ in range(3)] == [1, 1, 2]


def test_one_quiet_second_gives_nothing_back() -> None:
    clock = Clock(2)
    for others in (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0):
        last = clock.look(others)
    assert last == 1


def test_looks_too_close_together_or_too_far_apart_say_nothing() -> None:
    clock = Clock(2)
    assert [clock.look(others=2.0, seconds=0.01) for _ in range(20)][-1] == 2
    assert [clock.look(others=2.0, seconds=60.0) for _ in range(5)][-1] == 2


def test_the_machine_tells_who_computes() -> None:
    times = machine.cpu_times(os.getpid())
    assert times is not None
    assert 1 <= times.num_cpus <= (os.cpu_count() or 1)
    assert times.runner > 0
    assert machine.cpu_times(2**22 + 1) is None
