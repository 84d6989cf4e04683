"""PURE: which models make room for another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A loaded model. `remaining` is how long it would stay without a new request, in seconds (infinite: for ever)."""

    key: str
    size_bytes: int
    remaining: float
    is_busy: bool


def choose_victims(
    candidates: Iterable[Candidate], *, num_bytes: int, num_models: int, can_wait: bool = False
) -> list[str] | None:
    """Keys of the models to end so that `num_bytes` and `num_models` places come free; None when that cannot be.

    Idle ones go first, and among them the one with the least time left per byte: it would go soon, or gives much.
    Busy ones are chosen only if `can_wait`, and are meant to finish first.
    """
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=_order):
        if _is_enough(chosen, num_bytes, num_models):
            break
        if can_wait or not candidate.is_busy:
            chosen.append(candidate)
    if not _is_enough(chosen, num_bytes, num_models):
        return None
    return [candidate.key for candidate in _without_needless(chosen, num_bytes, num_models)]


def _order(candidate: Candidate) -> tuple[bool, float, int]:
    return candidate.is_busy, candidate.remaining / max(1, candidate.size_bytes), -candidate.size_bytes


def _is_enough(chosen: list[Candidate], num_bytes: int, num_models: int) -> bool:
    return sum(c.size_bytes for c in chosen) >= num_bytes and len(chosen) >= num_models


def _without_needless(chosen: list[Candidate], num_bytes: int, num_models: int) -> list[Candidate]:
    """Spare the most precious ones that a later, larger choice has made needless."""
    kept = list(chosen)
    for candidate in reversed(chosen):
        rest = [c for c in kept if c is not candidate]
        if _is_enough(rest, num_bytes, num_models):
            kept = rest
    return kept
