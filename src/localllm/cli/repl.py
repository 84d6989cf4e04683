"""The prompt loop of `localllm run` on a terminal."""

from __future__ import annotations

import contextlib
from typing import Any

from localllm.cli import output
from localllm.cli.client import Client
from localllm.cli.run import RunOptions, print_answer, print_timings
from localllm.errors import DaemonUnavailable, LocalLLMError

PROMPT, CONTINUATION = ">>> ", "... "
_HELP = """\
  /clear         Forget the conversation
  /bye, /exit    Leave (also Ctrl+D)
  /?, /help      This help
  \"\"\"            Begin and end a message of several lines
  Ctrl+C         Stop the answer"""
_LEAVE = ("/bye", "/exit")


class Repl:
    """Owns the conversation. A line that begins with a slash is a command only if it is one of ours."""

    def __init__(self, client: Client, options: RunOptions) -> None:
        self._client = client
        self._options = options
        self._messages: list[dict[str, Any]] = []

    def run(self) -> None:
        """Until the user leaves. Raises what makes going on pointless."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and a history of lines
        with output.waiting("loading the model"):
            self._client.call("POST", "/api/generate", {**self._options.body(), "prompt": "", "stream": False})
        while True:
            try:
                text = self._read()
            except EOFError:
                output.line()
                return
            except KeyboardInterrupt:
                output.line("\nUse Ctrl+D or /bye to leave.")
                continue
            if text.strip() in _LEAVE:
                return
            self._handle(text)

    @staticmethod
    def _read() -> str:
        """One message: a line, or what stands between two triple quotes."""
        text = input(PROMPT)
        if not text.lstrip().startswith('"""'):
            return text
        text = text.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input(CONTINUATION)
        return text.rstrip()[:-3]

    def _handle(self, text: str) -> None:
        command = text.strip()
        if command in ("/?", "/help"):
            output.line(_HELP)
        elif command == "/clear":
            self._messages.clear()
            output.line("Cleared the conversation.")
        elif command:
            self._ask(text)

    def _ask(self, text: str) -> None:
        """Send a message and print the answer; an answer that was stopped or failed leaves no trace."""
        question = {"role": "user", "content": text}
        body = {**self._options.body(), "messages": [*self._messages, question]}
        recorded: list[str] = []
        try:
            final = print_answer(self._record(body, recorded), "content", self._options)
        except KeyboardInterrupt:
            output.line("\n")
            return
        except DaemonUnavailable:
            raise
        except LocalLLMError as error:
            output.print_error(error)
            return
        self._messages += [question, {"role": "assistant", "content": "".join(recorded)}]
        output.write("\n\n")
        if self._options.verbose:
            print_timings(final)

    def _record(self, body: dict[str, Any], recorded: list[str]) -> Any:
        for event in self._client.stream("/api/chat", body):
            recorded.append(event.get("message", {}).get("content", ""))
            yield event
