"""The bodies and replies of /api, field by field as Ollama's clients know them.

In replies, a field with a default is left out when it has that value, and UNSET ones belong to another route.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from localllm.api.logprobs import NativeEntry
from localllm.api.shape import ANY_OBJECT, of_schema
from localllm.api.wire import AnswerBody, Body, check_integers, invalid
from localllm.errors import InvalidRequest, Unsupported
from localllm.types import Grammar, Message, Role, ToolCall

# ---- requests ----


class InferenceBody(AnswerBody, kw_only=True):
    """What generate and chat have in common."""

    stream: bool = True
    format: Any = UNSET
    think: Any = UNSET
    truncate: bool = True
    shift: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    debug_render_only: bool = msgspec.field(default=False, name="_debug_render_only")


class GenerateBody(InferenceBody, kw_only=True):
    prompt: str = ""
    images: tuple[Any, ...] = ()
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: tuple[int, ...] = ()
    raw: bool = False


class ToolFunctionBody(msgspec.Struct):
    name: str = ""
    arguments: Any = UNSET


class ToolCallBody(msgspec.Struct):
    function: ToolFunctionBody
    id: str = ""


class MessageBody(msgspec.Struct):
    role: str = ""
    content: str = ""
    thinking: str = ""
    images: list[Any] = []
    tool_calls: list[ToolCallBody] = []
    tool_name: str = ""
    tool_call_id: str = ""


class ChatBody(InferenceBody, kw_only=True):
    messages: tuple[MessageBody, ...] = ()
    tools: tuple[Any, ...] = ()


class NameBody(Body, kw_only=True):
    """A model by its name; `name` is the older spelling of `model`."""

    model: str = ""
    name: str = ""

    @property
    def reference(self) -> str:
        return self.model or self.name


class ShowBody(NameBody, kw_only=True):
    verbose: bool = False
    system: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class PullBody(NameBody, kw_only=True):
    insecure: bool = False
    stream: bool = True


class CopyBody(Body, kw_only=True):
    source: str = ""
    destination: str = ""


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def parse_role(role: str, where: str) -> Role:
    """Raises InvalidRequest that names `where`."""
    found = _ROLES.get(role.lower())
    if found is None:
        raise invalid(where, f'"{role}" is not system, user, assistant or tool')
    return found


def to_message(index: int, body: MessageBody) -> Message:
    """Raises InvalidRequest or Unsupported that names the message."""
    check_images(f"messages[{index}].images", body.images)
    return Message(
        role=parse_role(body.role, f"messages[{index}].role"),
        content=body.content,
        thinking=body.thinking,
        tool_calls=tuple(_tool_call(f"messages[{index}].tool_calls[{i}]", c) for i, c in enumerate(body.tool_calls)),
        tool_name=body.tool_name,
        tool_call_id=body.tool_call_id,
    )


def _tool_call(where: str, body: ToolCallBody) -> ToolCall:
    arguments = {} if body.function.arguments is UNSET else body.function.arguments
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments", "must be an object")
    check_integers(arguments, f"{where}.function.arguments")
    return ToolCall(body.id, body.function.name, arguments)


def check_images(where: str, images: Sequence[Any]) -> None:
    """Raises Unsupported when there are any."""
    if images:
        raise Unsupported(f'"{where}": images cannot be read', hint="Send text alone.", field=where)


def parse_format(format: Any) -> Grammar | None:
    """None when the answer may be anything. Raises InvalidRequest for what is no format."""
    if format is UNSET or format == "":
        return None
    if format == "json":
        return Grammar("json_schema", ANY_OBJECT)
    if isinstance(format, dict):
        return of_schema(format, "format")
    text = format if isinstance(format, str) else msgspec.json.encode(format).decode()
    raise InvalidRequest(f'invalid format: "{text}"; expected "json" or a valid JSON Schema object', field="format")


# ---- replies ----


class ReplyFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class ReplyToolCall(msgspec.Struct):
    id: str
    function: ReplyFunction


class ReplyMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    role: str
    content: str
    thinking: str = ""
    tool_calls: list[ReplyToolCall] = []


class InferenceReply(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A chunk, a whole answer, or the end of one. `message` is chat's, `response` generate's.

    Not Ollama's: `prompt_cached_count` of the prompt's tokens needed no computing; `draft_count` tokens were guessed
    ahead, `draft_accepted_count` of them rightly; `truncated` says that not all fitted the window,
    `dropped_message_count` and `dropped_token_count` what was left out.
    """

    model: str
    created_at: datetime
    message: ReplyMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str = ""
    done: bool
    done_reason: str = ""
    logprobs: list[NativeEntry] = []
    context: tuple[int, ...] = ()
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_cached_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    draft_count: int = 0
    draft_accepted_count: int = 0
    truncated: bool = False
    dropped_message_count: int = 0
    dropped_token_count: int = 0


class DebugInfo(msgspec.Struct):
    rendered_template: str
    image_count: int = 0


class DebugReply(msgspec.Struct, kw_only=True):
    """The prompt that would have been sent to the model."""

    model: str
    created_at: datetime
    response: str | UnsetType = UNSET
    message: ReplyMessage | UnsetType = UNSET
    done: bool = False
    debug_info: DebugInfo = msgspec.field(name="_debug_info")


class RenderReply(msgspec.Struct):
    model: str
    prompt: str
    tokens: tuple[int, ...]
    num_tokens: int


class Details(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`context_length` and `embedding_length` are given by /api/tags only."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int = 0
    embedding_length: int = 0


class ListedModel(msgspec.Struct, omit_defaults=True, kw_only=True):
    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: Details
    capabilities: list[str] = []


class RunnerState(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What Ollama does not tell about a loaded model.

    `load_fraction` is there while it is being loaded, `step_age` while it is busy: the seconds since its last step.
    """

    state: str
    pid: int | None
    num_slots: int
    num_in_flight: int
    num_queued: int
    num_threads: int
    num_threads_batch: int
    num_gpu_layers: int
    kv_cache_type: str
    speculates: bool
    is_pinned: bool
    loaded_because: str
    load_fraction: float | UnsetType = UNSET
    step_age: float | UnsetType = UNSET


class RunningModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: datetime
    size_vram: int
    context_length: int
    runner: RunnerState


class ListedModels(msgspec.Struct):
    models: list[ListedModel]


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class Tensor(msgspec.Struct):
    name: str
    type: str
    shape: list[int]


class ShownMessage(msgspec.Struct):
    role: str
    content: str


class ShowReply(msgspec.Struct, omit_defaults=True, kw_only=True):
    license: str = ""
    modelfile: str
    parameters: str = ""
    template: str
    system: str = ""
    details: Details
    messages: list[ShownMessage] = []
    model_info: dict[str, Any]
    projector_info: dict[str, Any] | UnsetType = UNSET
    tensors: list[Tensor] = []
    capabilities: list[str]
    modified_at: datetime
