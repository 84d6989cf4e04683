from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from localllm.cli.format import human_duration, human_size, human_time, parse_time

NOW = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1500, "1.5 KB"),
        (98_362_432, "98 MB"),
        (986_999_999, "986 MB"),
        (2_000_000_000, "2 GB"),
        (2_019_393_189, "2.0 GB"),
        (43_000_000_000, "43 GB"),
        (1_200_000_000_000, "1.2 TB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert human_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "Less than a second"),
        (1, "1 second"),
        (59, "59 seconds"),
        (60, "About a minute"),
        (150, "2 minutes"),
        (3599, "59 minutes"),
        (3600, "About an hour"),
        (5400, "2 hours"),
        (3600 * 47, "47 hours"),
        (3600 * 48, "2 days"),
        (86400 * 14, "2 weeks"),
        (86400 * 60, "2 months"),
        (86400 * 365 * 2, "2 years"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert human_time(NOW - timedelta(seconds=seconds), NOW) == f"{text} ago"
    assert human_time(NOW + timedelta(seconds=seconds), NOW) == f"{text} from now"


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (4_935_886_791, "4.935886791s"),
        (107_345_000, "107.345ms"),
        (12_500, "12.5µs"),
        (2_000_000_000, "2s"),
        (123_500_000_000, "2m3.5s"),
        (3_600_000_000_000, "1h0m0s"),
    ],
)
def test_durations(nanoseconds: int, text: str) -> None:
    assert human_duration(nanoseconds) == text


@pytest.mark.parametrize(
    "text",
    [
        "2026-06-01T12:00:00Z",
        "2026-06-01T12:00:00.000000000Z",
        "2026-06-01T14:00:00.0+02:00",
        "2026-06-01T10:00:00-02:00",
        "2026-06-01T12:00:00",
    ],
)
def test_reads_every_way_to_write_a_time(text: str) -> None:
    assert parse_time(text) == NOW


def test_keeps_microseconds_of_nine_digits() -> None:
    assert parse_time("2026-06-01T12:00:00.123456789Z").microsecond == 123456
