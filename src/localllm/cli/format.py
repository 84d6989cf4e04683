"""PURE: sizes, times and durations in words, the way Ollama writes them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def human_size(size: int) -> str:
    """Bytes in units of 1000: "986 MB", "2.1 GB", "2 GB" for exactly that (one decimal below ten)."""
    for unit, name in _UNITS:
        if size >= unit:
            value = size / unit
            return f"{value:.1f} {name}" if value < 10 and size % unit else f"{int(value)} {name}"
    return f"{size} B"


def human_time(when: datetime, now: datetime) -> str:
    """ "2 days ago" or "4 minutes from now"."""
    distance = when - now
    return f"{human_span(abs(distance))} {'from now' if distance > timedelta(0) else 'ago'}"


def human_span(span: timedelta) -> str:
    """One number and one unit; minutes are cut and hours are rounded."""
    seconds = int(span.total_seconds())
    minutes, hours = seconds // 60, round(span.total_seconds() / 3600)
    for is_it, text in (
        (seconds < 1, "Less than a second"),
        (seconds == 1, "1 second"),
        (seconds < 60, f"{seconds} seconds"),
        (minutes == 1, "About a minute"),
        (minutes < 60, f"{minutes} minutes"),
        (hours == 1, "About an hour"),
        (hours < 48, f"{hours} hours"),
        (hours < 24 * 14, f"{hours // 24} days"),
        (hours < 24 * 60, f"{hours // 24 // 7} weeks"),
        (hours < 24 * 365 * 2, f"{hours // 24 // 30} months"),
    ):
        if is_it:
            return text
    return f"{hours // 24 // 365} years"


def human_duration(nanoseconds: int) -> str:
    """As Go prints durations: "4.935886791s", "107.345ms", "2m3.5s"."""
    if nanoseconds < 1_000_000_000:
        unit, name = (1_000_000, "ms") if nanoseconds >= 1_000_000 else (1000, "µs")
        return f"{nanoseconds / unit:.6f}".rstrip("0").rstrip(".") + name
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1e9:.9f}".rstrip("0").rstrip(".") + "s"
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}{seconds}"


def parse_time(text: str) -> datetime:
    """An RFC 3339 time, also with nine fractional digits or a Z, which Python 3.10 does not read."""
    head, dot, tail = text.replace("Z", "+00:00").partition(".")
    if dot:
        zone = tail.lstrip("0123456789")
        head = f"{head}.{tail.removesuffix(zone)[:6]:0<6}{zone}"
    when = datetime.fromisoformat(head)
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)
