"""A conversation, with what is typed coming from a list. How it feels on a terminal is tested on one, in e2e."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fixtures.fake_daemon import CUT, FakeDaemon, Reply, chatted, error
from tests.unit.cli.conftest import Result, Run

Converse = Callable[..., Result]
Typed = str | type[BaseException]


@pytest.fixture
def converse(run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Converse:
    """Types these lines, presses Ctrl+C for a KeyboardInterrupt, and leaves with Ctrl+D."""
    daemon.on("POST", "/api/generate", Reply({"done": True, "done_reason": "load"}))
    if ("POST", "/api/chat") not in daemon.replies:
        daemon.on("POST", "/api/chat", chatted("Hel", "lo."))

    def start(*typed: Typed, flags: tuple[str, ...] = ()) -> Result:
        lines = [*typed, EOFError]

        def ask(prompt: str) -> str:
            line = lines.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("localllm.cli.output.ask", ask)
        monkeypatch.setattr("localllm.cli.output.can_converse", lambda: True)
        return run("run", "m", *flags)

    return start


def messages(daemon: FakeDaemon) -> list[list[str]]:
    """The contents of each request's messages."""
    return [[message["content"] for message in body["messages"]] for body in daemon.bodies("/api/chat")]


def test_each_question_takes_the_conversation_along(converse: Converse, daemon: FakeDaemon) -> None:
    result = converse("one", "two")
    assert (result.status, result.out, result.err) == (0, "Hello.\n\nHello.\n\n\n", "")
    assert messages(daemon) == [["one"], ["one", "Hello.", "two"]]
    assert [m["role"] for m in daemon.bodies("/api/chat")[1]["messages"]] == ["user", "assistant", "user"]


def test_flags_go_into_every_request_and_into_the_load_before(converse: Converse, daemon: FakeDaemon) -> None:
    converse("one", flags=("--keepalive", "5m", "--think=low"))
    (load,), (chat,) = daemon.bodies("/api/generate"), daemon.bodies("/api/chat")
    assert load == {"model": "m", "keep_alive": "5m", "think": "low", "stream": False}
    assert (chat["keep_alive"], chat["think"]) == ("5m", "low")


def test_clear_forgets(converse: Converse, daemon: FakeDaemon) -> None:
    converse("one", "/clear", "two")
    assert messages(daemon) == [["one"], ["two"]]


@pytest.mark.parametrize("command", ["/bye", "/exit", " /bye "])
def test_commands_to_leave(converse: Converse, daemon: FakeDaemon, command: str) -> None:
    assert converse(command, "never said").status == 0
    assert messages(daemon) == []


@pytest.mark.parametrize("command", ["/?", "/help"])
def test_help_names_the_commands(converse: Converse, command: str) -> None:
    out = converse(command).out
    assert all(word in out for word in ("/clear", "/bye", "/exit", "/help", '"""', "Ctrl+C", "Ctrl+D"))


@pytest.mark.parametrize("text", ["/etc/hosts is what?", "/clearly not a command", "/"])
def test_other_text_that_begins_with_a_slash_is_text(converse: Converse, daemon: FakeDaemon, text: str) -> None:
    converse(text)
    assert messages(daemon) == [[text]]


def test_a_command_of_ollama_that_is_none_here_is_not_sent(converse: Converse, daemon: FakeDaemon) -> None:
    assert converse("/set parameter seed 1").err == "Error: /set is not supported\nHint: Type /? for help.\n"
    assert messages(daemon) == []


def test_empty_lines_ask_nothing(converse: Converse, daemon: FakeDaemon) -> None:
    converse("", "   ")
    assert messages(daemon) == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (['"""first', "", 'last"""'], "first\n\nlast"),
        (['"""', "  indented", '"""'], "  indented"),
        (['"""one line"""'], "one line"),
        (['"""/bye', '"""'], "/bye"),
    ],
    ids=["lines", "alone", "one", "command"],
)
def test_three_quotes_hold_a_message(converse: Converse, daemon: FakeDaemon, typed: list[str], message: str) -> None:
    converse(*typed)
    assert messages(daemon) == [[message]]


def test_ctrl_c_abandons_a_message_of_several_lines(converse: Converse, daemon: FakeDaemon) -> None:
    result = converse('"""first', KeyboardInterrupt, "other")
    assert result.status == 0
    assert messages(daemon) == [["other"]]


def test_what_a_model_begins_with_is_shown_and_not_sent(converse: Converse, daemon: FakeDaemon) -> None:
    history = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A parrot."}]
    daemon.on("POST", "/api/show", Reply({"messages": history}))
    assert converse("hi").out.startswith(">>> Who are you?\n\nA parrot.\n\n")
    assert messages(daemon) == [["hi"]]


def test_verbose_shows_timings_after_each_answer(converse: Converse, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/chat", chatted("Hi.", eval_count=3, eval_duration=10**9))
    assert converse("a", "b", flags=("--verbose",)).err.count("eval rate:            3.00 tokens/s\n") == 2


def test_an_error_ends_neither_the_conversation_nor_stays_in_it(converse: Converse, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/chat", error("too many wait", hint="Try later.", status=503), chatted("Hello."))
    result = converse("one", "two")
    assert (result.status, result.out, result.err) == (0, "Hello.\n\n\n", "Error: too many wait\nHint: Try later.\n")
    assert messages(daemon) == [["one"], ["two"]]


def test_a_daemon_that_goes_away_does_not_end_a_conversation(converse: Converse, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/chat", chatted("Hello."), [*chatted("Hel")[:-1], CUT], chatted("Hello."))
    assert "Error: the daemon went away" in converse("one", "two", "three").err
    assert messages(daemon)[-1] == ["one", "Hello.", "three"]


def test_a_model_that_does_not_load_ends_it_with_an_error(converse: Converse, daemon: FakeDaemon) -> None:
    conversation = converse
    daemon.on("POST", "/api/generate", error("it needs 9 GB, and 4 GB are there", status=507))
    result = conversation("never said")
    assert (result.status, result.err) == (1, "Error: it needs 9 GB, and 4 GB are there\n")
