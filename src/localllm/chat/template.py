"""The model's own Jinja chat template: compiled once, rendered for each request."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from localllm.chat.filters import Refusal, do_tojson
from localllm.chat.formats import close_thinking
from localllm.chat.formats.families import is_harmony
from localllm.chat.limits import LimitExceeded
from localllm.chat.sandbox import Sandbox
from localllm.chat.shapes import Shape, Tools, as_dict, find_shape
from localllm.errors import TemplateError
from localllm.types import Message, ThinkLevel

MAX_SOURCE_CHARACTERS = 128 << 10

# What a model without a template of its own gets: the most widely trained-on form.
FALLBACK_SOURCE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ChatTemplate:
    """Not for concurrent use by several threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """An empty `source` stands for the built-in fallback. Raises TemplateError when it does not compile."""
        self.is_fallback = not source.strip()
        self.source = FALLBACK_SOURCE if self.is_fallback else source
        self._bos = bos_token
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError("the model's chat template is absurdly long", hint="The model file may be hostile.")
        try:
            with self._sandbox.limits():
                self._template = self._sandbox.from_string(self.source)
        except TemplateError:
            raise
        # The compiler meets whatever somebody wrote, so it fails in more ways than Jinja's own errors.
        except Exception as error:
            raise TemplateError(
                f"the model's chat template cannot be used: {error}",
                hint="Use another build of the model, or send raw prompts.",
            ) from None

    def limits(self) -> contextlib.AbstractContextManager[None]:
        """All renders inside share the limits of one, so that trying several forms takes no longer than one may."""
        return self._sandbox.limits()

    def starts_with_bos(self, prompt: str) -> bool:
        """True when the template has written the beginning-of-sequence token: no second one may be put before it."""
        return bool(self._bos) and prompt.startswith(self._bos)

    @property
    def hides_tools(self) -> bool:
        """True when the template does not tell the model about the tools it is given."""
        with self.limits():
            return self._shape.hides_tools

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        think: bool | ThinkLevel | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for exactly these messages; `history.render` is more forgiving.

        Raises Refusal when the template rejects them, LimitExceeded, or TemplateError when the template breaks.
        """
        with self.limits():
            prompt = self._render(self._shape, messages, tools, think, add_generation_prompt)
        return close_thinking(self.source, prompt) if think is False and add_generation_prompt else prompt

    @functools.cached_property
    def _shape(self) -> Shape:
        return find_shape(self._try_render)

    def _try_render(self, shape: Shape, messages: Sequence[Message], tools: Tools) -> str | None:
        try:
            return self._render(shape, messages, tools, None, add_generation_prompt=True)
        except LimitExceeded:
            raise
        except TemplateError:
            return None

    def _render(
        self,
        shape: Shape,
        messages: Sequence[Message],
        tools: Tools,
        think: bool | ThinkLevel | None,
        add_generation_prompt: bool,
    ) -> str:
        variables: dict[str, Any] = {
            **self._tokens,
            **self._thinking_variables(think),
            "messages": [as_dict(message, shape, do_tojson) for message in messages],
            "tools": [dict(tool) for tool in tools] or ([] if shape.has_empty_tools else None),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            variables["xml_tools"] = variables["tools"]  # SmolLM3's name for them
        try:
            return self._sandbox.render(self._template, variables)
        except TemplateError:
            raise
        # As above: a template is a program, and all that it does wrong is its own kind of error.
        except Exception as error:
            raise TemplateError(f"the model's chat template failed: {type(error).__name__}: {error}") from None

    def _thinking_variables(self, think: bool | ThinkLevel | None) -> dict[str, Any]:
        """`enable_thinking` is Qwen's switch, `thinking` DeepSeek's and Granite's, `reasoning_effort` gpt-oss's.

        Absent means the model's own default. gpt-oss cannot but think, so it is asked to do so the least.
        """
        if think is None:
            return {}
        if isinstance(think, bool):
            effort = {"reasoning_effort": "low"} if not think and is_harmony(self.source) else {}
            return {"enable_thinking": think, "thinking": think, **effort}
        return {"enable_thinking": True, "thinking": True, "reasoning_effort": "high" if think == "max" else think}


__all__ = ["FALLBACK_SOURCE", "ChatTemplate", "LimitExceeded", "Refusal"]
