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
        while (text := self._read()) is not None:
            self._handle(text)

    def _read(self) -> str | None:
        """The next message; None when the user leaves."""
        while True:
            try:
                text = _read_message()
            except EOFError:
                output.line()
                return None
            except KeyboardInterrupt:
                output.line()
                if not _typed_so_far():
                    output.line("Use Ctrl+D or /bye to leave.")
                continue
            return None if text.strip() in _LEAVE else text

    def _handle(self, text: str) -> None:
        command = text.strip()
        if command in ("/?", "/help"):
            output.line(_HELP)
        elif command == "/clear":
            self._messages.clear()
            output.line("The conversation is forgotten.")
        elif command.split(" ")[0] in _OLLAMAS:
            output.print_error(LocalLLMError(f"{command.split(' ')[0]} is not supported", hint="Type /? for help."))
        elif command:
            self._ask(text)

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


def _read_message() -> str:
    """A line, or what stands between two triple quotes."""
    text = output.ask(PROMPT)
    if not text.lstrip().startswith(_QUOTES):
        return text
    text = text.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + output.ask(CONTINUATION)
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _typed_so_far() -> str:
    """What was on the line when it was interrupted, where that can be known."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline else ""
