"""What is said about how a runner ended."""

from __future__ import annotations

import sys

import pytest

from localllm.daemon.runner_process import RunnerProcess, describe_exit


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


async def test_a_runner_that_aborts_is_not_held_up_by_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    show = "import os; print('no backtrace:', os.environ.get('GGML_NO_BACKTRACE'))"
    process = await RunnerProcess.spawn([sys.executable, "-c", show], name="test")
    assert await process.ended() == 0
    assert process.last_lines == ["no backtrace: 1"]
    await process.channel.close()
