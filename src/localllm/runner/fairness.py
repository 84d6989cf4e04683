"""PURE: whose request comes next. By class, then deficit round-robin between clients, in tokens.

Deficit round-robin (M. Shreedhar and G. Varghese, 1996), charged for what was computed rather than for what is asked
for, because nobody knows how long an answer will be: a client may overdraw once and then waits its turns out.
"""

from __future__ import annotations

from collections.abc import Iterable

from localllm.runner.sequence import Sequence

# A turn is worth this many tokens: a short request's prompt and answer.
QUANTUM = 256
# A request that waits rises by one class in this time, so that nobody waits for ever.
AGEING_SECONDS = 20.0
# Beyond these, one class is as good as another: ageing must be able to reach the top.
MIN_PRIORITY, MAX_PRIORITY = -10, 10


class FairShare:
    """Who of the clients that have requests here is owed how many tokens."""

    def __init__(self) -> None:
        self._deficits: dict[str, float] = {}

    def next(self, waiting: Iterable[Sequence], now: float) -> Sequence | None:
        """The request to admit next; None when `waiting` is empty. Times in seconds of the sequences' clock."""
        ranked = [(rank(sequence, now), sequence) for sequence in waiting]
        if not ranked:
            return None
        first = min(ranked, key=lambda pair: pair[0])[0]
        oldest: dict[str, Sequence] = {}
        for candidate, sequence in sorted(ranked, key=lambda pair: pair[1].arrived_at):
            if candidate == first:
                oldest.setdefault(sequence.client, sequence)
        return oldest[self._turn(oldest)]

    def _turn(self, clients: Iterable[str]) -> str:
        """The client whose turn it is: the first that still has credit, after as many rounds as it takes."""
        clients = set(clients)
        for client in clients - self._deficits.keys():
            self._deficits[client] = QUANTUM
        best = max(self._deficits[client] for client in clients)
        num_rounds = max(0, int(-best // QUANTUM) + 1) if best <= 0 else 0
        for client in clients:
            self._deficits[client] = min(QUANTUM, self._deficits[client] + num_rounds * QUANTUM)
        # Dictionaries keep their order: whoever is charged down to nothing goes to the end of the round.
        return next(client for client in self._deficits if client in clients and self._deficits[client] > 0)

    def charge(self, client: str, num_tokens: int) -> None:
        """`num_tokens` were computed for `client`."""
        before = self._deficits.get(client, QUANTUM)
        if before > 0 >= before - num_tokens:
            self._deficits.pop(client, None)
        self._deficits[client] = before - num_tokens

    def leave(self, client: str) -> None:
        """`client` has nothing here any more; neither credit nor debt is kept for those who are away."""
        self._deficits.pop(client, None)


def rank(sequence: Sequence, now: float) -> int:
    """The class that a waiting sequence counts in; lower is sooner."""
    priority = min(max(sequence.priority, MIN_PRIORITY), MAX_PRIORITY)
    return priority - int(max(0.0, now - sequence.arrived_at) / AGEING_SECONDS)
