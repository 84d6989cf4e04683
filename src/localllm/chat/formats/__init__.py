"""Which parser understands what a model writes, chosen from its chat template.

A parser is fed text as it is generated and gives back deltas in which answer, thinking and tool calls are told apart.
It holds back only what may still turn out to be a tag, and never loses text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from localllm.chat.formats.calls import Schemas, parse_json
from localllm.chat.formats.families import call_rule, is_harmony, syntax_of, thinking_tags
from localllm.chat.formats.forced import ForcedCallParser
from localllm.chat.formats.harmony import HarmonyParser
from localllm.chat.formats.markup import write_pythonic
from localllm.chat.formats.tags import TagParser
from localllm.types import Delta, ThinkLevel, ToolCall


class OutputParser(Protocol):
    """`needs_special_tokens`: the tags are control tokens of the vocabulary, so they must be shown to the parser."""

    needs_special_tokens: bool

    def feed(self, text: str) -> list[Delta]:
        """What `text` completes; `text` is never empty."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back when the text has ended."""
        ...


class PlainParser:
    """For text in which nothing has a special meaning."""

    needs_special_tokens = False

    def feed(self, text: str) -> list[Delta]:
        return [Delta(text)]

    def finish(self) -> list[Delta]:
        return []


def parser_for(
    template: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | ThinkLevel | None = None,
    prompt: str = "",
) -> OutputParser:
    """The parser for a model with this chat template ("" for raw text).

    `prompt` is what the template rendered: some end inside an opened thinking tag. Thinking is recognised whatever
    `think` says, so that no tag leaks into the answer.
    """
    schemas = schemas_of(tools)
    if is_harmony(template):
        return HarmonyParser(schemas, prompt)
    syntax = syntax_of(template, has_tools=bool(schemas))
    if syntax.is_plain:
        return PlainParser()
    starts_thinking = syntax.thinking is not None and prompt.rstrip().endswith(syntax.thinking.opener)
    return TagParser(syntax, schemas, starts_thinking=starts_thinking)


def forced_parser(
    template: str, *, tools: Sequence[Mapping[str, Any]], think: bool | ThinkLevel | None, prompt: str
) -> OutputParser:
    """For an answer that can be nothing but a call of one of `tools`."""
    return ForcedCallParser(parser_for(template, think=think, prompt=prompt), schemas_of(tools))


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The parameters of the functions in OpenAI-style definitions, by name."""
    functions = [tool.get("function") for tool in tools]
    named = [function for function in functions if isinstance(function, Mapping) and function.get("name")]
    return {str(f["name"]): p if isinstance(p := f.get("parameters"), Mapping) else {} for f in named}


def capabilities_of(template: str) -> set[str]:
    """What a model with this chat template can do beyond completing, by Ollama's rule for Jinja templates."""
    tools = {"tools"} if "tools" in template or "tool_call" in template else set()
    return tools | ({"thinking"} if thinking_tags(template) or is_harmony(template) else set())


def close_thinking(template: str, prompt: str) -> str:
    """`prompt` with thinking ended that its template has begun, for a request that wants none."""
    tags = thinking_tags(template)
    if tags is None or not prompt.rstrip().endswith(tags.opener):
        return prompt
    return f"{prompt}\n{tags.closer}\n\n" if prompt.endswith("\n") else f"{prompt}{tags.closer}"


def write_calls(template: str, calls: Sequence[ToolCall]) -> str:
    """Tool calls as the model writes them, or as its parser reads them, for a template that cannot write them."""
    blocks = call_rule(template).blocks
    if any(block.opener == "<|tool_call_start|>" for block in blocks):
        return f"<|tool_call_start|>{write_pythonic(calls)}<|tool_call_end|>"
    opener, closer = next(((b.opener, b.closer) for b in blocks if b.parse is parse_json), ("", ""))
    objects = (json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls)
    return "\n".join(f"{opener}\n{text}\n{closer}".strip() for text in objects)


def describe_tools(template: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says about tools, for a template that does not tell the model about them."""
    definitions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(template, [ToolCall("", "NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You can use these tools:\n\n{definitions}\n\n"
        f"To use one, answer with nothing but its name and the values of its parameters, in this form:\n\n{example}\n\n"
        "You will then be given the result. When no tool helps, answer in plain words."
    )
