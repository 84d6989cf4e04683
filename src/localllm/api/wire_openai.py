"""The bodies and replies of /v1/chat/completions and /v1/models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from localllm.api.logprobs import ChatLogprobs, CompletionLogprobs
from localllm.api.wire import AnswerBody

# ---- requests ----


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Reasoning(msgspec.Struct):
    effort: Any = UNSET


class FunctionBody(msgspec.Struct):
    name: str = ""
    arguments: Any = UNSET


class ToolCallBody(msgspec.Struct):
    function: FunctionBody
    id: str = ""


class MessageBody(msgspec.Struct):
    """`content` is a string or a list of parts; `reasoning_content` is how some other servers spell `reasoning`."""

    role: str = ""
    content: Any = UNSET
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallBody, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatCompletionBody(AnswerBody, kw_only=True):
    """`num_ctx` and `think` are not OpenAI's: they mean what they mean on /api/chat.

    `prediction` is taken, and not needed: what may be guessed is found in the conversation itself.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"], []),
        "web_search_options": (),
    }

    messages: tuple[MessageBody, ...] = ()
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    max_tokens: int | UnsetType = UNSET
    max_completion_tokens: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: str | tuple[str, ...] | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    response_format: dict[str, Any] = msgspec.field(default_factory=dict)
    prediction: Any = UNSET
    tools: tuple[Any, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Any = UNSET
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    num_ctx: int | UnsetType = UNSET
    think: Any = UNSET


class CompletionBody(AnswerBody, kw_only=True):
    """`prompt` is text or the ids of tokens, or a list of either. The extensions are those of ChatCompletionBody."""

    prompt: Any = ""
    suffix: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    max_tokens: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: str | tuple[str, ...] | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    logprobs: int | UnsetType = UNSET
    n: int = 1
    best_of: int | UnsetType = UNSET
    echo: bool = False
    num_ctx: int | UnsetType = UNSET


# ---- replies ----


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: str


class ReplyToolCall(msgspec.Struct, kw_only=True):
    index: int
    id: str
    type: str = "function"
    function: ReplyFunction


class ReplyMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A whole message, or in a stream what is new of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ReplyToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, omit_defaults=True, kw_only=True):
    index: int
    message: ReplyMessage | UnsetType = UNSET
    delta: ReplyMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | UnsetType = UNSET
    finish_reason: str | None


class TextChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """A predicted token is one that was guessed ahead; `reasoning_tokens` belong to thinking."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Completion(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A whole answer, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET


class TextCompletion(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A whole answer, or one chunk of it, to a prompt that is continued."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str


class ModelCards(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
