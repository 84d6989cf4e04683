"""The radix index finds what a plain comparison with every holder would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runner.prefix_index import BLOCK, PrefixIndex, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=5 * BLOCK)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_matches_are_those_of_a_plain_comparison(data: st.DataObject) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    plain: dict[int, list[int]] = {}
    lists: dict[int, list[int]] = {}
    base = data.draw(TOKENS)
    for _ in range(data.draw(st.integers(0, 12))):
        holder = data.draw(st.integers(0, 4))
        action = data.draw(st.sampled_from(["put", "put", "advance", "remove"]))
        if action == "put":
            lists[holder] = base[: data.draw(st.integers(0, len(base)))] + data.draw(TOKENS)
            length = data.draw(st.integers(0, len(lists[holder])))
            index.put(holder, lists[holder], length)
            plain[holder] = lists[holder][:length]
        elif action == "advance" and holder in plain:
            lists[holder].extend(data.draw(TOKENS))
            length = data.draw(st.integers(len(plain[holder]), len(lists[holder])))
            index.advance(holder, length)
            plain[holder] = lists[holder][:length]
        elif action == "remove":
            index.remove(holder)
            plain.pop(holder, None)
        index.check_integrity()
    prompt = base + data.draw(TOKENS)
    limit = data.draw(st.integers(0, len(prompt)))
    assert index.matches(prompt, limit) == {h: common_prefix(t, prompt, limit) for h, t in plain.items()}
    assert {holder: index.tokens(holder) for holder in plain} == plain


def test_common_prefix_is_the_length_up_to_the_first_difference() -> None:
    for difference in range(40):
        left = list(range(40))
        right = [*left[:difference], -1, *left[difference + 1 :]]
        assert common_prefix(left, right, 40) == difference
    assert common_prefix([1, 2, 3], [1, 2, 3, 4], 2) == 2
