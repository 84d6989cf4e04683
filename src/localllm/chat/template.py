"""The model's own Jinja chat template, run in a sandbox.

A template is part of a file that somebody else made. It sees no attribute that leads out of its data, cannot change
what it is given, and has limits on time and on the size of what it makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from localllm.errors import TemplateError
from localllm.types import Message, ThinkLevel

RENDER_SECONDS = 2.0
MAX_RENDERED_CHARACTERS = 64 << 20
MAX_REPEATED_CHARACTERS = 1 << 20
MAX_SOURCE_CHARACTERS = 4 << 20

# What a model without a template of its own gets: the most widely trained-on form.
FALLBACK_SOURCE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Refusal(TemplateError):
    """The template called raise_exception: it does not accept this history, but may accept another form of it."""


class _OutOfTime(BaseException):
    """Raised into the rendering thread from outside; not an Exception, so that nothing in between swallows it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in this thread after `seconds`.

    Rendering is Python bytecode, so an asynchronous exception reaches any loop or recursion in it; signals would not
    do, as they only reach the main thread.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OutOfTime))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training spans for Transformers; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses the two operators whose single application can take for ever or fill the memory."""

    intercepted_binops = frozenset({"**", "*"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _repeated_size(left, right) or _repeated_size(right, left)
        if operator == "**" or size > MAX_REPEATED_CHARACTERS:
            raise jinja2.exceptions.SecurityError(f"the operator {operator} would make something too large")
        return super().call_binop(context, operator, left, right)


def _repeated_size(what: Any, times: Any) -> int:
    return len(what) * times if hasattr(what, "__len__") and isinstance(times, int) else 0


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As Transformers does it: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """Compiled once, rendered for each request. Not for concurrent use by several threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """An empty `source` stands for the built-in fallback. Raises TemplateError when it does not compile."""
        self.is_fallback = not source.strip()
        self.source = FALLBACK_SOURCE if self.is_fallback else source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError("the model's chat template is absurdly long", hint="The model file may be hostile.")
        try:
            with _time_limit(RENDER_SECONDS):
                self._template = _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(
                f"the model's chat template cannot be used: {error}",
                hint="Use another build of the model, or send raw prompts.",
            ) from None
        except _OutOfTime:
            raise TemplateError("the model's chat template takes too long to compile") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        think: bool | ThinkLevel | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for `messages`. Raises Refusal when the template rejects them, TemplateError when it breaks."""
        variables: dict[str, Any] = {
            **self._tokens,
            **_thinking_variables(think),
            "messages": [_as_dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with _time_limit(RENDER_SECONDS):
                text = self._template.render(variables)
        except Refusal:
            raise
        except _OutOfTime:
            raise TemplateError(f"the model's chat template ran for more than {RENDER_SECONDS:g} s") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError) as error:
            raise TemplateError(f"the model's chat template failed: {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise TemplateError(f"the model's chat template failed: {type(error).__name__}: {error}") from None
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise TemplateError("the model's chat template made an absurdly long prompt")
        return text


def _thinking_variables(think: bool | ThinkLevel | None) -> dict[str, Any]:
    """`enable_thinking` is Qwen's switch, `reasoning_effort` gpt-oss's; absent means the model's own default."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return {"enable_thinking": True, "reasoning_effort": "high" if think == "max" else think}


def _as_dict(message: Message) -> dict[str, Any]:
    """The OpenAI-like form that templates are written for."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        result["reasoning_content"] = result["thinking"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_name:
        result["name"] = message.tool_name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result
