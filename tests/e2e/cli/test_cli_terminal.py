"""The command for a person: prompts, editing, colours, progress and Ctrl+C, on a pseudo-terminal."""

from __future__ import annotations

import re
import readline
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.fixtures.cli import Terminal
from tests.fixtures.fake_daemon import FakeDaemon, Part, Reply, chatted, generated, not_found

Start = Callable[..., Terminal]
FACTS = Reply({"details": {}, "model_info": {}, "capabilities": ["completion"]})
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def answers(daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", Reply({"done": True, "done_reason": "load"}))
    daemon.on("POST", "/api/chat", chatted("Hel", "lo."))


@pytest.fixture
def prompt(terminal: Start) -> Callable[..., Terminal]:
    """A conversation that waits for the first message."""

    def start(*arguments: str, **settings: Any) -> Terminal:
        screen = terminal("run", "m", *arguments, **settings)
        screen.expect(">>> ")
        return screen

    return start


def say(screen: Terminal, text: str, answer: str = "Hello.") -> None:
    screen.enter(text)
    screen.expect(answer)
    screen.expect(">>> ")


def messages(daemon: FakeDaemon) -> list[list[str]]:
    """The contents of each request's messages."""
    return [[message["content"] for message in body["messages"]] for body in daemon.bodies("/api/chat")]


# ---- a conversation ----


def test_lines_can_be_edited_and_called_back(prompt: Start, daemon: FakeDaemon) -> None:
    screen = prompt()
    say(screen, "helo\x1b[Dl")
    say(screen, "\x1b[A!")
    screen.press_ctrl("D")
    assert screen.wait() == 0
    assert messages(daemon) == [["hello"], ["hello", "Hello.", "hello!"]]


def test_three_quotes_begin_lines_with_dots(prompt: Start, daemon: FakeDaemon) -> None:
    screen = prompt()
    screen.enter('"""first')
    screen.expect("... ")
    say(screen, 'last"""')
    assert messages(daemon) == [["first\nlast"]]


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="editline knows no bracketed paste")
def test_pasted_lines_are_one_message(prompt: Start, daemon: FakeDaemon) -> None:
    screen = prompt()
    say(screen, "\x1b[200~one\ntwo\x1b[201~")
    assert messages(daemon) == [["one\ntwo"]]


# ---- Ctrl+C ----


def test_ctrl_c_stops_the_answer_and_drops_it(prompt: Start, daemon: FakeDaemon) -> None:
    first, *rest = chatted("Hel", "lo.")
    daemon.on("POST", "/api/chat", [first, threading.Event(), *rest], chatted("Hello."))
    screen = prompt()
    screen.enter("one")
    screen.expect("Hel")
    screen.press_ctrl("C")
    screen.expect(">>> ")
    assert daemon.client_left.wait(5)
    say(screen, "two")
    assert messages(daemon) == [["one"], ["two"]]


def test_ctrl_c_clears_the_line_and_then_says_how_to_leave(prompt: Start, daemon: FakeDaemon) -> None:
    screen = prompt()
    screen.send("half a thought")
    screen.expect("half a thought")
    screen.press_ctrl("C")
    assert "/bye" not in screen.expect(">>> ")
    screen.press_ctrl("C")
    assert "Use Ctrl+D or /bye to leave." in screen.expect(">>> ")
    say(screen, "whole")
    assert messages(daemon) == [["whole"]]


def test_ctrl_c_ends_a_single_answer_with_130(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", [*generated("Hel")[:-1], threading.Event()])
    screen = terminal("run", "m", "hi")
    screen.expect("Hel")
    screen.press_ctrl("C")
    assert screen.wait() == 130
    assert daemon.client_left.wait(5)


def test_ctrl_c_ends_a_pull_with_130(terminal: Start, daemon: FakeDaemon) -> None:
    half: Part = {"status": "pulling abc", "total": 2_000_000, "completed": 1_000_000}
    daemon.on("POST", "/api/pull", [half, threading.Event()])
    screen = terminal("pull", "m")
    screen.expect("pulling abc")
    screen.press_ctrl("C")
    assert screen.wait() == 130
    assert "Traceback" not in screen.rest()


# ---- trouble in a conversation ----


def test_messages_that_were_dropped_are_mentioned(prompt: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/chat", chatted("Hello.", truncated=True, dropped_message_count=2))
    screen = prompt()
    screen.enter("hi")
    screen.expect("the 2 oldest messages were left out")


# ---- what it looks like ----


def shown(text: str) -> list[str]:
    """The lines on the screen, where words are taken back only by moving left and erasing."""
    while match := re.search(r"\x1b\[(\d+)D\x1b\[K", text):
        text = text[: match.start() - int(match[1])] + text[match.end() :]
    return [line.rstrip() for line in text.splitlines()]


def test_words_are_wrapped_five_columns_before_the_edge(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("the qui", "ck brown fo", "x jumps"))
    screen = terminal("run", "m", "hi", columns=15, TERM="vt100")
    text = re.sub(r"\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K", "", screen.rest())
    lines = [line for line in shown(text) if line and "waiting" not in line]
    assert lines[-3:] == ["the quick", "brown fox", "jumps"]


def test_a_pull_shows_bars(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"), FACTS)
    bars: list[Part] = [
        {"status": "pulling manifest"},
        {"status": "pulling abc", "total": 98_000_000, "completed": 1},
        {"status": "pulling abc", "total": 98_000_000, "completed": 98_000_000},
        {"status": "success"},
    ]
    daemon.on("POST", "/api/pull", bars)
    daemon.on("POST", "/api/generate", generated("Hello."))
    text = terminal("run", "m", "hi").rest()
    assert "pulling manifest" in text
    assert "98.0/98.0 MB" in text
    assert "Hello." in text


def test_thinking_is_grey_unless_no_color_is_wanted(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", [{"thinking": "Hm.", "response": ""}, *generated("Blue.")])
    assert f"{ESCAPE}[90mHm.{ESCAPE}[0m" in terminal("run", "m", "hi").rest()
    text = terminal("run", "m", "hi", NO_COLOR="1").rest()
    assert "Hm." in text
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", text)


def test_a_dumb_terminal_gets_plain_text(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"), FACTS)
    daemon.on("POST", "/api/pull", [{"status": "pulling abc", "total": 10, "completed": 5}, {"status": "success"}])
    daemon.on("POST", "/api/generate", [{"thinking": "Hm.", "response": ""}, *generated("Blue.")])
    text = terminal("run", "m", "hi", TERM="dumb").rest()
    assert ESCAPE not in text
    assert text.replace("\r", "").endswith("pulling abc\nsuccess\nThinking...\nHm.\n...done thinking.\n\nBlue.\n\n")


def test_a_model_cannot_drive_the_terminal(terminal: Start, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("a\x1b]0;pwned\x07b\x1b[2Jc"))
    assert "a]0;pwnedb[2Jc" in terminal("run", "m", "hi").rest()
