"""PURE speculation by prompt lookup: what followed the last few tokens before may well follow them again.

The idea is A. Saxena's "prompt lookup decoding" (2023). A draft is checked by sampling as usual, token by token, for as
long as the samples agree with it: answers are distributed exactly as without, whatever the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.runner.cost import StepCost

# The longest run of tokens that is looked up, and the shortest that counts as evidence.
_NGRAM = 3
MAX_DRAFT_TOKENS = 16
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_FIRST_ACCEPTANCE = 0.7
_SMOOTHING = 0.25
# Below this a request stops drafting, and tries again after so many tokens: an answer may begin to quote late.
_MIN_ACCEPTANCE = 0.25
_PAUSE_TOKENS = 48
# Drafting must promise this much more than going without, since the promise is an estimate.
_MIN_GAIN = 1.1


class Drafter:
    """What one sequence proposes. Sees every token of the prompt and of the answer once."""

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` is the sequence's own list, which goes on growing."""
        self.restart(tokens)
        self.acceptance = _FIRST_ACCEPTANCE
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def restart(self, tokens: list[int]) -> None:
        """The sequence has another list now."""
        self._tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}
        self._num_seen = 0
        self._paused_until = 0

    def propose(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the last time the end of the sequence was seen; often none."""
        self._look()
        if len(self._tokens) < self._paused_until or limit <= 0:
            return []
        position = self._after.get(tuple(self._tokens[-_NGRAM:]))
        if position is None:
            return []
        draft = self._tokens[position : position + limit]
        # What is known of the continuation may itself be short because it has just begun: then it repeats.
        while draft and len(draft) < limit and position + len(draft) >= len(self._tokens):
            draft = (draft + draft)[:limit]
        return draft

    def _look(self) -> None:
        """Remember what follows each run of tokens, but for the last one, which nothing follows yet."""
        tokens = self._tokens
        for end in range(max(self._num_seen, _NGRAM), len(tokens)):
            self._after[tuple(tokens[end - _NGRAM : end])] = end
        self._num_seen = len(tokens)

    def learn(self, num_draft: int, num_accepted: int) -> None:
        """`num_accepted` of a draft of `num_draft` tokens turned out right."""
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        num_checked = min(num_draft, num_accepted + 1)
        for index in range(num_checked):
            self.acceptance += _SMOOTHING * ((index < num_accepted) - self.acceptance)
        if self.acceptance < _MIN_ACCEPTANCE:
            self._paused_until = len(self._tokens) + _PAUSE_TOKENS
            self.acceptance = _FIRST_ACCEPTANCE / 2


@dataclass(frozen=True)
class Proposal:
    """`draft` tokens of one sequence, each of which is right with the probability `acceptance` if those before are."""

    id: str
    draft: list[int]
    acceptance: float


def choose_drafts(proposals: list[Proposal], num_decoding: int, cost: StepCost, room: int) -> dict[str, list[int]]:
    """The drafts that make the step give the most tokens per second; empty when none would.

    All have one length: llama.cpp computes sequences of different lengths in different micro-batches, and each of those
    reads all weights again. `room`: draft tokens that fit the batch and its rows of logits.
    """
    if not proposals or not cost.is_known:
        return {}
    best_rate = _MIN_GAIN * num_decoding / cost.decode_step(num_decoding)
    best: dict[str, list[int]] = {}
    for length in _LENGTHS:
        able = [p for p in proposals if len(p.draft) >= length]
        if not able or length * len(able) > room:
            continue
        seconds = cost.decode_step(num_decoding + length * len(able))
        if len(able) < num_decoding:
            seconds += cost.read_weights
        rate = (num_decoding + sum(_expected(p.acceptance, length) for p in able)) / seconds
        if rate > best_rate:
            best_rate, best = rate, {p.id: p.draft[:length] for p in able}
    return best


def _expected(acceptance: float, length: int) -> float:
    """Expected number of tokens accepted of a draft of `length`."""
    return sum(acceptance**index for index in range(1, length + 1))
