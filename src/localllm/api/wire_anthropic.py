"""The bodies, replies and events of /v1/messages."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from localllm.api.wire import AnswerBody

# ---- requests ----


class MessageBody(msgspec.Struct):
    """`content` is a string or a list of blocks."""

    role: str = ""
    content: Any = UNSET


class ToolChoiceBody(msgspec.Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingBody(msgspec.Struct):
    type: str = "disabled"


class FormatBody(msgspec.Struct):
    type: str = ""
    schema: Any = UNSET


class OutputConfigBody(msgspec.Struct):
    effort: str = ""
    format: FormatBody | UnsetType = UNSET


class CountTokensBody(AnswerBody, kw_only=True):
    """What both routes read."""

    messages: tuple[MessageBody, ...] = ()
    system: Any = UNSET
    tools: tuple[Any, ...] = ()
    tool_choice: ToolChoiceBody = msgspec.field(default_factory=ToolChoiceBody)
    thinking: ThinkingBody = msgspec.field(default_factory=ThinkingBody)
    output_config: OutputConfigBody = msgspec.field(default_factory=OutputConfigBody)


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int = 0
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    stop_sequences: tuple[str, ...] = ()
    stream: bool = False


# ---- replies ----


class Block(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of type text, thinking or tool_use."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that had to be computed, as Anthropic counts them; the others were in the cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(msgspec.Struct):
    input_tokens: int


# ---- events ----


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageReply


class Ping(msgspec.Struct, tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class Stopped(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: Stopped
    usage: Usage


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


Event = MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
