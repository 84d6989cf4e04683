"""PURE: other forms of a conversation, which say the same in ways that more templates accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from localllm.types import Message, ToolCall

Messages = tuple[Message, ...]
Form = Callable[[Messages], Messages]


def link_calls(messages: Messages) -> Messages:
    """Gives calls and results the ids and names that clients may leave out, as templates rely on them.

    A result without an id answers the first unanswered call of its tool, else the first unanswered call.
    """
    linked: list[Message] = []
    unanswered: list[ToolCall] = []
    for index, message in enumerate(messages):
        if message.tool_calls:
            calls = tuple(_with_id(call, f"call_{index:05d}{i:03d}") for i, call in enumerate(message.tool_calls))
            message = msgspec.structs.replace(message, tool_calls=calls)
            unanswered = list(calls)
        elif message.role == "tool" and (call := _answered(message, unanswered)):
            unanswered.remove(call)
            message = msgspec.structs.replace(
                message, tool_call_id=message.tool_call_id or call.id, tool_name=message.tool_name or call.name
            )
        linked.append(message)
    return tuple(linked)


def _with_id(call: ToolCall, id: str) -> ToolCall:
    return call if call.id else ToolCall(id, call.name, call.arguments)


def _answered(result: Message, calls: Sequence[ToolCall]) -> ToolCall | None:
    if result.tool_call_id:
        return next((call for call in calls if call.id == result.tool_call_id), None)
    return next((call for call in calls if call.name == result.tool_name), calls[0] if calls else None)


def join_system(messages: Messages) -> Messages:
    """System messages at the beginning become one; later ones go into the user's turn that they stand before."""
    start = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    texts = [message.content for message in messages[:start] if message.content]
    leading = (Message("system", "\n\n".join(texts)),) if texts else ()
    return (*leading, *_as_user(messages[start:]))


def add_system(messages: Messages, text: str) -> Messages:
    """With `text` at the end of the first system message, which is made if there is none."""
    if messages and messages[0].role == "system":
        return (Message("system", _join(messages[0].content, text)), *messages[1:])
    return (Message("system", text), *messages)


def fold_system(messages: Messages) -> Messages:
    """For templates without a system role: all system text goes into the user's turns."""
    return tuple(_as_user(messages))


def _as_user(messages: Messages) -> Iterator[Message]:
    """Later merging joins a system text, now the user's, with the user's own text beside it."""
    for message in messages:
        yield Message("user", message.content) if message.role == "system" else message


def merge_same_roles(messages: Messages) -> Messages:
    """Joins neighbours of one role with a blank line; results and calls of tools stay apart, as they carry ids."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.role == message.role != "tool" and not last.tool_calls and not message.tool_calls:
            merged[-1] = msgspec.structs.replace(
                last, content=_join(last.content, message.content), thinking=_join(last.thinking, message.thinking)
            )
        else:
            merged.append(message)
    return tuple(merged)


def split_calls(messages: Messages) -> Messages:
    """For templates that write a text or a call, but not both, or one call at a time.

    The text comes first; each call is a message of its own, followed by its results.
    """
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if not message.tool_calls:
            split.append(message)
            continue
        end = next((i for i in range(at, len(messages)) if messages[i].role != "tool"), len(messages))
        split += _split_round(message, messages[at:end])
        at = end
    return tuple(split)


def _split_round(message: Message, results: Messages) -> Iterator[Message]:
    if message.content:
        yield Message("assistant", message.content)
    rest = list(results)
    for index, call in enumerate(message.tool_calls):
        yield Message("assistant", thinking=message.thinking if index == 0 else "", tool_calls=(call,))
        own = [result for result in rest if result.tool_call_id == call.id]
        yield from own
        rest = [result for result in rest if result not in own]
    yield from rest


def write_calls(write: Callable[[Sequence[ToolCall]], str]) -> Form:
    """For templates that know no calls: they become text, as the model writes them."""

    def form(messages: Messages) -> Messages:
        return tuple(
            Message("assistant", _join(m.content, write(m.tool_calls)), m.thinking) if m.tool_calls else m
            for m in messages
        )

    return form


def write_results(messages: Messages) -> Messages:
    """For templates that know no results of tools: they become text of the user."""
    return tuple(
        Message("user", f"<tool_response>\n{m.content}\n</tool_response>") if m.role == "tool" else m for m in messages
    )


def _join(left: str, right: str) -> str:
    return f"{left}\n\n{right}" if left and right else left or right
