"""What is said about how a runner ended."""

from __future__ import annotations

import pytest

from localllm.daemon.runner_process import describe_exit


@pytest.mark.parametrize(
    ("status", "lines", "words"),
    [
        (0, [], "ended with status 0"),
        (1, ["oh", "no"], "ended with status 1 (last words: oh | no)"),
        (-6, ["assert"], "was killed by SIGABRT (last words: assert)"),
        (-9, [], "was killed by SIGKILL (perhaps because memory ran out)"),
        (-9, ["x"], "was killed by SIGKILL (perhaps because memory ran out; last words: x)"),
        (-250, [], "was killed by signal 250"),
        (1, list("abcdefg"), "ended with status 1 (last words: c | d | e | f | g)"),
        (1, ["x" * 1000], f"ended with status 1 (last words: {'x' * 200})"),
    ],
)
def test_an_exit_in_words(status: int, lines: list[str], words: str) -> None:
    assert describe_exit(status, lines) == words
