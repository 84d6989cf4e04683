"""`localllm run`: one answer, or a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from localllm.cli import output
from localllm.cli.answer import AnswerWriter, print_answer, print_remarks, print_timings
from localllm.cli.client import Client
from localllm.cli.launcher import connect
from localllm.cli.models import local_file, pull_model
from localllm.cli.piped import read_piped
from localllm.config import Config, parse_duration
from localllm.errors import InvalidRequest, InvalidUsage, ModelNotFound
from localllm.store.names import name_from_stem

_THINK_VALUES = ("true", "false", "high", "medium", "low", "max")


@dataclass(frozen=True)
class RunOptions:
    """The flags of `run`, as they were given; empty means not given."""

    keepalive: str = ""
    verbose: bool = False
    insecure: bool = False
    wordwrap: bool = True
    format: str = ""
    think: str = ""
    hidethinking: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of a request that they mean. Raises InvalidUsage for a value that cannot be one."""
        fields: dict[str, Any] = {}
        if self.keepalive:
            fields["keep_alive"] = _duration(self.keepalive)
        if self.format:
            fields["format"] = _format(self.format)
        if self.think:
            fields["think"] = _think(self.think)
        return fields

    def writer(self) -> AnswerWriter:
        return AnswerWriter(wordwrap=self.wordwrap, hidethinking=self.hidethinking)


def _duration(text: str) -> str:
    try:
        parse_duration(text)
    except InvalidRequest as error:
        raise InvalidUsage(f"invalid value for --keepalive: {error.message}", hint=error.hint) from None
    return text


def _format(text: str) -> Any:
    if text == "json":
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidUsage(f'invalid value for --format: "{text}"', hint="Use json, or a JSON schema.") from None


def _think(text: str) -> bool | str:
    if text not in _THINK_VALUES:
        raise InvalidUsage(
            f'invalid value for --think: "{text}" (must be true, false, high, medium, low, or max)',
            hint="Write it with an equals sign: --think=low.",
        )
    return {"true": True, "false": False}.get(text, text)


def run_model(config: Config, reference: str, words: list[str], options: RunOptions) -> None:
    """Answer the prompt made of standard input and `words`; with neither, on a terminal, begin a conversation."""
    fields = options.fields()
    prompt = _prompt(words)
    with connect(config) as client:
        model, shown = ensure_model(client, reference, insecure=options.insecure)
        if prompt is None and output.can_converse():
            from localllm.cli.repl import Repl

            Repl(client, config, {"model": model, **fields}, options).run(shown.get("messages") or [])
        else:
            _answer_once(client, {"model": model, "prompt": prompt or "", **fields}, options)


def _prompt(words: list[str]) -> str | None:
    """None when nothing was said at all; an empty argument counts as said."""
    # Arguments that are no UTF-8 come with surrogates, which JSON cannot carry.
    pieces = [word.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for word in words]
    if piped := read_piped(has_prompt=bool(words)):
        pieces.insert(0, piped)
    return " ".join(pieces) if pieces else None


def _answer_once(client: Client, body: dict[str, Any], options: RunOptions) -> None:
    if not body["prompt"]:
        with output.waiting("loading the model"):
            client.call("POST", "/api/generate", {**body, "stream": False})
        output.remark("Note: there was no prompt, so the model was only loaded.")
        return
    answer = print_answer(client.stream("/api/generate", body), options.writer())
    output.write("\n\n")
    print_remarks(answer.final)
    if options.verbose:
        print_timings(answer.final)


def ensure_model(client: Client, reference: str, *, insecure: bool) -> tuple[str, dict[str, Any]]:
    """The name by which the daemon knows the model, and what it shows of it; it is pulled when it is not here."""
    model = _name_of(reference)
    if local_file(reference):
        # The file may be another than last time; one that is the same costs a look at it.
        pull_model(client, reference)
    try:
        return model, client.call("POST", "/api/show", {"model": model})
    except ModelNotFound:
        pull_model(client, reference, insecure=insecure)
    return model, client.call("POST", "/api/show", {"model": model})


def _name_of(reference: str) -> str:
    """The name that a file or an address is kept under; a name is its own."""
    if path := local_file(reference):
        return name_from_stem(path.stem).display
    if reference.startswith(("http://", "https://")):
        path_there = PurePosixPath(urlsplit(reference).path)
        if path_there.suffix.lower() == ".gguf":
            return name_from_stem(path_there.stem).display
    return reference
