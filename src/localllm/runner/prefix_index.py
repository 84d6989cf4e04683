"""PURE radix index: which holders of tokens begin like a given prompt, and for how long.

A trie whose edges are blocks of tokens. A holder is registered in every node on its path, so that one walk down finds
all that share a beginning; the rest of the last block is compared token by token.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BLOCK = 16

Holder = TypeVar("Holder", bound=Hashable)


def common_prefix(left: Tokens[int], right: Tokens[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`. Compares slices, which runs at C speed."""
    low, high = 0, min(len(left), len(right), limit)
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class _Node(Generic[Holder]):
    # Dictionaries keep the order of insertion, so the same traffic gives the same choices.
    holders: dict[Holder, None] = field(default_factory=dict)
    children: dict[tuple[int, ...], _Node[Holder]] = field(default_factory=dict)


@dataclass(slots=True)
class _Held(Generic[Holder]):
    tokens: Tokens[int]
    length: int
    path: list[_Node[Holder]]


class PrefixIndex(Generic[Holder]):
    """Maps each holder to the first `length` tokens of a sequence that may go on growing."""

    def __init__(self) -> None:
        self._root: _Node[Holder] = _Node()
        self._held: dict[Holder, _Held[Holder]] = {}

    def put(self, holder: Holder, tokens: Tokens[int], length: int) -> None:
        """`holder` holds the first `length` of `tokens`, and nothing else any more. The list is kept, not copied."""
        self.remove(holder)
        self._root.holders[holder] = None
        self._held[holder] = _Held(tokens, 0, [self._root])
        self.advance(holder, length)

    def advance(self, holder: Holder, length: int) -> None:
        """`holder` holds `length` tokens of its sequence now, not fewer than before."""
        held = self._held[holder]
        assert held.length <= length <= len(held.tokens)
        for start in range((len(held.path) - 1) * BLOCK, length - BLOCK + 1, BLOCK):
            block = tuple(held.tokens[start : start + BLOCK])
            node = held.path[-1].children.setdefault(block, _Node())
            node.holders[holder] = None
            held.path.append(node)
        held.length = length

    def remove(self, holder: Holder) -> None:
        """Forget `holder`; unknown ones are ignored."""
        held = self._held.pop(holder, None)
        if held is None:
            return
        for depth in range(len(held.path) - 1, -1, -1):
            del held.path[depth].holders[holder]
            if depth and not held.path[depth].holders:
                start = (depth - 1) * BLOCK
                del held.path[depth - 1].children[tuple(held.tokens[start : start + BLOCK])]

    def tokens(self, holder: Holder) -> list[int]:
        held = self._held[holder]
        return list(held.tokens[: held.length])

    def length(self, holder: Holder) -> int:
        return self._held[holder].length

    def matches(self, tokens: Tokens[int], limit: int) -> dict[Holder, int]:
        """Every holder with the length of the prefix that it shares with the first `limit` of `tokens`."""
        path = [self._root]
        for start in range(0, limit - BLOCK + 1, BLOCK):
            child = path[-1].children.get(tuple(tokens[start : start + BLOCK]))
            if child is None:
                break
            path.append(child)
        found: dict[Holder, int] = {}
        for depth in range(len(path) - 1, -1, -1):
            start = depth * BLOCK
            rest = tokens[start : min(start + BLOCK, limit)]
            for holder in path[depth].holders:
                if holder not in found:
                    held = self._held[holder]
                    own = held.tokens[start : min(start + BLOCK, held.length)]
                    found[holder] = start + common_prefix(own, rest, BLOCK)
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError when a holder's path does not spell its tokens."""
        for holder, held in self._held.items():
            assert 0 <= held.length <= len(held.tokens), f"{holder} claims more than it was given"
            assert len(held.path) == held.length // BLOCK + 1, f"{holder} is registered for another length"
            assert all(holder in node.holders for node in held.path), f"{holder} is missing on its path"
