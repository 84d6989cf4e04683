"""The prompt loop of `localllm run` on a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from localllm.cli import output
from localllm.cli.answer import print_answer, print_remarks, print_timings
from localllm.cli.client import Client
from localllm.cli.launcher import ensure_running
from localllm.cli.run import RunOptions
from localllm.config import Config
from localllm.errors import LocalLLMError

PROMPT, CONTINUATION = ">>> ", "... "
_QUOTES = '"""'
_HELP = f"""\
Commands:
  /clear         Forget the conversation
  /bye, /exit    Leave (so does Ctrl+D)
  /?, /help      This help

  {_QUOTES}            Begins and ends a message of several lines
  Ctrl+C         Stops the answer, or clears the line
"""
_LEAVE = ("/bye", "/exit")
_ASK_FOR_HELP = ("/?", "/help")
# Commands of Ollama's prompt: who types one does not mean to say it to the model.
_OLLAMAS = ("/set", "/show", "/load", "/save", "/list")


class Repl:
    """Owns the conversation. A line that begins with a slash is a command only if it is a known one."""

    def __init__(self, client: Client, config: Config, fields: dict[str, Any], options: RunOptions) -> None:
        """`fields` go into every request."""
        self._client = client
        self._config = config
        self._fields = fields
        self._options = options
        self._messages: list[dict[str, Any]] = []

    def run(self, history: list[dict[str, Any]]) -> None:
        """Until the user leaves. `history` is what the model always begins with, which is shown and not sent."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and a history of lines
        with output.waiting("loading the model"):
            self._client.call("POST", "/api/generate", {**self._fields, "stream": False})
        for message in history:
            output.line(f"{PROMPT if message.get('role') == 'user' else ''}{message.get('content', '')}\n")
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One message or command; False when the user leaves."""
        try:
            text, is_quoted = _read_message()
        except EOFError:
            output.line()
            return False
        except KeyboardInterrupt:
            output.line()
            if not _typed_so_far():
                output.line("Use Ctrl+D or /bye to leave.")
            return True
        command = "" if is_quoted else text.strip()
        if command in _LEAVE:
            return False
        if command in _ASK_FOR_HELP:
            output.line(_HELP)
        elif command == "/clear":
            self._messages.clear()
            output.line("The conversation is forgotten.")
        elif command.split(" ")[0] in _OLLAMAS:
            output.print_error(LocalLLMError(f"{command.split(' ')[0]} is not supported", hint="Type /? for help."))
        elif text.strip():
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        """Send a message and print the answer; an answer that was stopped or failed leaves no trace."""
        question = {"role": "user", "content": text}
        body = {**self._fields, "messages": [*self._messages, question]}
        try:
            ensure_running(self._client, self._config)
            answer = print_answer(self._client.stream("/api/chat", body), self._options.writer())
        except KeyboardInterrupt:
            output.line("\n")
            return
        except LocalLLMError as error:
            output.print_error(error)
            return
        self._messages += [question, {"role": "assistant", "content": answer.text}]
        output.write("\n\n")
        print_remarks(answer.final)
        if self._options.verbose:
            print_timings(answer.final)


def _read_message() -> tuple[str, bool]:
    """A line and False, or what stands between two triple quotes and True."""
    text = output.ask(PROMPT)
    if not text.lstrip().startswith(_QUOTES):
        return text, False
    text = text.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + output.ask(CONTINUATION)
    return text.rstrip().removesuffix(_QUOTES).strip("\n"), True


def _typed_so_far() -> str:
    """What was on the line when it was interrupted, where that can be known."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline else ""
