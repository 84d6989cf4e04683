"""The bodies, replies and events of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from localllm.api.wire import AnswerBody

# ---- requests ----


class ReasoningBody(msgspec.Struct):
    effort: Any = UNSET


class TextBody(msgspec.Struct):
    format: dict[str, Any] = msgspec.field(default_factory=dict)


class ResponsesBody(AnswerBody, kw_only=True):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
    }

    input: Any = UNSET
    instructions: str = ""
    previous_response_id: str = ""
    store: bool = True
    stream: bool = False
    tools: tuple[Any, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    reasoning: ReasoningBody = msgspec.field(default_factory=ReasoningBody)
    text: TextBody = msgspec.field(default_factory=TextBody)
    truncation: str = "disabled"
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


# ---- replies ----


class Part(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of type output_text or summary_text."""

    type: str
    text: str
    annotations: list[Any] | UnsetType = UNSET


class Item(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of type reasoning, message or function_call."""

    type: str
    id: str
    status: str = ""
    role: str | UnsetType = UNSET
    content: list[Part] | UnsetType = UNSET
    summary: list[Part] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    reason: str


class Failure(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: list[Item]
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: tuple[Any, ...]
    truncation: str
    usage: Usage | None = None


class Event(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
