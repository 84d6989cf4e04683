"""Which parser understands what a model writes, chosen from its chat template.

A parser is fed text as it is generated and gives back deltas in which answer, thinking and tool calls are told apart.
It holds back only what may still turn out to be a tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from localllm.chat.formats.harmony import HarmonyParser
from localllm.chat.formats.tags import TagParser, Tags, ToolSyntax
from localllm.chat.formats.tools import (
    parse_glm,
    parse_json_calls,
    parse_llama,
    parse_mistral,
    parse_pythonic,
    parse_qwen_coder,
)
from localllm.types import Delta, ThinkLevel


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


@dataclass(frozen=True)
class _Rule:
    """`marks` must all occur in the template for the rule to apply; the first rule that does wins."""

    marks: tuple[str, ...]
    value: Tags | ToolSyntax


_THINKING = (
    _Rule(("[THINK]", "[/THINK]"), Tags("[THINK]", "[/THINK]")),
    _Rule(("<|START_THINKING|>",), Tags("<|START_THINKING|>", "<|END_THINKING|>")),
    _Rule(("<seed:think>",), Tags("<seed:think>", "</seed:think>")),
    _Rule(("<think>",), Tags("<think>", "</think>")),
    _Rule(("</think>",), Tags("<think>", "</think>")),
)

_TOOLS = (
    _Rule(("<function=", "<parameter="), ToolSyntax("<tool_call>", "</tool_call>", parse_qwen_coder)),
    _Rule(("<arg_key>",), ToolSyntax("<tool_call>", "</tool_call>", parse_glm)),
    _Rule(("<|tool_call_start|>",), ToolSyntax("<|tool_call_start|>", "<|tool_call_end|>", parse_pythonic)),
    _Rule(("<|START_ACTION|>",), ToolSyntax("<|START_ACTION|>", "<|END_ACTION|>", parse_json_calls)),
    _Rule(("[TOOL_CALLS]",), ToolSyntax("[TOOL_CALLS]", None, parse_mistral)),
    _Rule(("<tool_call>",), ToolSyntax("<tool_call>", "</tool_call>", parse_json_calls)),
    _Rule(("<|tool_call|>",), ToolSyntax("<|tool_call|>", None, parse_json_calls)),
    _Rule(("<|python_tag|>",), ToolSyntax("<|python_tag|>", None, parse_llama, is_bare=True)),
)
# A template that knows tools but none of the tags: the call is the whole answer, as JSON.
_GENERIC_TOOLS = ToolSyntax("", None, parse_llama, is_bare=True)


def parser_for(
    template: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | ThinkLevel | None = None,
    prompt: str = "",
) -> OutputParser:
    """The parser for a model with this chat template ("" for raw text).

    `prompt` is what the template rendered: some end inside an opened thinking tag. With `think` False, thinking is
    still recognised, so that no tag leaks into the answer.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return HarmonyParser(tool_names(tools))
    thinking = _first(_THINKING, template)
    syntax = (_first(_TOOLS, template) or _GENERIC_TOOLS) if tools else None
    if thinking is None and syntax is None:
        return PlainParser()
    assert thinking is None or isinstance(thinking, Tags)
    assert syntax is None or isinstance(syntax, ToolSyntax)
    starts_thinking = thinking is not None and prompt.rstrip().endswith(thinking.opener)
    return TagParser(thinking, syntax, tool_names(tools), starts_thinking=starts_thinking)


def _first(rules: Sequence[_Rule], template: str) -> Tags | ToolSyntax | None:
    return next((rule.value for rule in rules if all(mark in template for mark in rule.marks)), None)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the functions in OpenAI-style tool definitions."""
    return frozenset(str(tool.get("function", {}).get("name", "")) for tool in tools) - {""}
