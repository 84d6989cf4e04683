"""The command in scripts: pipes, signals, and standard streams in odd states."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.cli.conftest import Done
from tests.fixtures.cli import COMMAND, PATIENCE_SECONDS, started
from tests.fixtures.fake_daemon import FakeDaemon, Reply, generated, not_found

Localllm = Callable[..., Done]
MODEL = {
    "name": "m:latest",
    "digest": "ab" * 32,
    "size": 1,
    "modified_at": "2026-01-01T00:00:00Z",
}
FACTS = Reply({"details": {}, "model_info": {}, "capabilities": ["completion"]})


@pytest.fixture(autouse=True)
def answer(daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("Hel", "lo"))


def prompts(daemon: FakeDaemon) -> list[str]:
    return [body["prompt"] for body in daemon.bodies("/api/generate")]


# ---- what goes in ----


def test_piped_text_comes_before_the_prompt(localllm: Localllm, daemon: FakeDaemon) -> None:
    done = localllm("run", "m", "Summarise", "this", input=b"some text\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello\n\n", b"")
    assert prompts(daemon) == ["some text\n Summarise this"]


def test_piped_text_alone_is_the_prompt_and_what_is_no_text_is_replaced(localllm: Localllm, daemon: FakeDaemon) -> None:
    assert localllm("run", "m", input="Grüße, ".encode() + b"caf\xe9").returncode == 0
    assert prompts(daemon) == ["Grüße, caf\ufffd"]


def test_an_input_that_never_ends_does_not_stop_a_prompt(env: dict[str, str], daemon: FakeDaemon) -> None:
    """What a script, a service or a build leaves to a command: an input that nobody writes to and nobody closes."""
    with started(("run", "m", "hi"), env, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == b"Hello\n\n"
        assert process.stderr.read().startswith(b"Warning: standard input is open, but nothing came")
        assert process.wait(PATIENCE_SECONDS) == 0
    assert prompts(daemon) == ["hi"]


def test_a_pipeline_is_waited_for_however_long_it_takes(env: dict[str, str], daemon: FakeDaemon) -> None:
    """The shell has no end of the pipe, so this is no leftover: its writer is only slower than our patience."""
    command = " ".join(COMMAND)
    done = subprocess.run(
        ["sh", "-c", f"(sleep 2.3; echo text) | {command} run m Summarise"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert (done.stdout, prompts(daemon)) == (b"Hello\n\n", ["text\n Summarise"])


# ---- what comes out ----


def test_nothing_but_plain_text_comes_out(localllm: Localllm, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/tags", Reply({"models": [MODEL]}))
    daemon.on("POST", "/api/show", not_found("m"), FACTS)
    bar = [{"status": "pulling abc", "digest": "sha256:abc", "total": 10, "completed": n} for n in range(11)]
    daemon.on("POST", "/api/pull", [{"status": "pulling manifest"}, *bar, {"status": "success"}])
    thoughts = [{"thinking": "Hm.", "response": ""}, *generated("word " * 100)]
    daemon.on("POST", "/api/generate", thoughts)
    outputs = []
    for arguments in (["run", "m", "hi", "--think"], ["list"], ["run", "--help"]):
        done = localllm(*arguments)
        assert (done.returncode, done.stderr) == (0, b"")
        assert not re.search(rb"[\x1b\r]", done.stdout)
        outputs.append(done.stdout)
    # Nor is it wrapped.
    assert b"word " * 100 + b"\n\n" in outputs[0]


def test_an_answer_is_printed_while_it_is_made(env: dict[str, str], daemon: FakeDaemon) -> None:
    more = threading.Event()
    first, *rest = generated("Hel", "lo")
    daemon.on("POST", "/api/generate", [first, more, *rest])
    with started(("run", "m", "hi"), env) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"Hel"
        more.set()
        assert process.stdout.read() == b"lo\n\n"


def test_a_plain_locale_is_no_trouble(localllm: Localllm, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("Grüße \u2028 日本"))
    done = localllm("run", "m", "hi", env_more={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"Gr")


# ---- how it ends ----


def test_a_reader_that_leaves_ends_it_quietly(env: dict[str, str], daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", [*generated("word\n")[:-1], *generated(*(["word\n"] * 5000)), threading.Event()])
    command = " ".join(COMMAND)
    script = f"{{ {command} run m hi; echo status $? >&2; }} | head -n 1"
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, timeout=PATIENCE_SECONDS, check=True)
    assert (done.stdout, done.stderr) == (b"word\n", b"status 141\n")


def test_ctrl_c_cancels_the_request(env: dict[str, str], daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", [*generated("Hel")[:-1], threading.Event()])
    with started(("run", "m", "hi"), env) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(3) == b"Hel"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130
        assert process.stderr.read() == b""
    assert daemon.client_left.wait(5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_output_that_cannot_be_written_is_an_error(env: dict[str, str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with started(("run", "m", "hi"), env, stdout=full) as process:
        os.close(full)
        assert process.stderr is not None
        assert process.stderr.read() == b"Error: the output cannot be written: No space left on device\n"
        assert process.wait(PATIENCE_SECONDS) == 1


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_trouble(env: dict[str, str], daemon: FakeDaemon, closed: str) -> None:
    script = f"{' '.join(COMMAND)} run m hi {closed}"
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"Hello\n\n" if closed == "2>&-" else b"")
    assert prompts(daemon) == ["hi"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [([], 0), (["show", "nobody"], 1), (["nonsense"], 2)],
    ids=["help", "error", "usage"],
)
def test_exit_statuses(localllm: Localllm, daemon: FakeDaemon, arguments: list[str], status: int) -> None:
    daemon.on("POST", "/api/show", not_found("nobody"))
    done = localllm(*arguments)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
