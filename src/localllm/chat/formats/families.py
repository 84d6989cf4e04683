"""PURE: which tags a model uses, told from its chat template.

The tables are facts about models: what their templates contain, and what they were trained to write.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from localllm.chat.formats.calls import CallParser, Parsed, Schemas, either, marked, parse_json
from localllm.chat.formats.markup import markup, parse_gemma, parse_pythonic
from localllm.chat.formats.tags import Block, Syntax, Tags


def _unclosed(opener: str, closer: str) -> Callable[[str], bool]:
    """A closing tag inside a value that has not been closed yet is part of the value."""
    return lambda text: text.count(opener) > text.count(closer)


def _without(*tags: str) -> CallParser:
    """JSON between any of `tags`."""
    pattern = re.compile("|".join(map(re.escape, tags)))

    def parse(text: str, schemas: Schemas) -> Parsed | None:
        return parse_json(pattern.sub("", text), schemas)

    return parse


# <function=NAME><parameter=KEY>…</parameter>…</function>
_FUNCTION = markup(
    r"\s*(?:<[\w:]*tool_call>)?\s*<function=(?P<name>[^>\n]+)>"
    r"(?P<body>.*?)</function>\s*(?:</[\w:]*tool_call>|(?=<function=)|\Z)",
    r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))",
)
# <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value>…</tool_call>
_ARG_KEY = markup(
    r"\s*<tool_call>\s*(?P<name>[^<\n]+?)\s*(?P<body>(?:<arg_key>.*)?)</tool_call>\s*\Z",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))",
)
# <invoke name="NAME"><parameter name="KEY">…</parameter>…</invoke>, for DeepSeek with a mark in each tag.
_INVOKE = markup(
    r'\s*<(?:｜DSML｜)?invoke name="(?P<name>[^"\n]+)">(?P<body>.*?)</(?:｜DSML｜)?invoke>\s*(?=<|\Z)',
    r'<(?:｜DSML｜)?parameter name="(?P<key>[^"\n]+)"(?: string="(?P<is_text>\w+)")?>'
    r"(?P<value>.*?)</(?:｜DSML｜)?parameter>(?=\s*(?:<|\Z))",
)
_DEEPSEEK = marked(
    r"(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+?)\s*(?:<｜tool▁sep｜>|```json)",
    r"(?:```)?\s*(?:<｜tool▁call▁end｜>)?",
)
_KIMI = marked(
    r"(?:<\|tool_call_begin\|>)?\s*(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    r"(?:<\|tool_call_end\|>)?",
)
_MISTRAL = either(
    marked(r"(?:\[TOOL_CALLS\])?\s*(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\s*\{)"), parse_json
)
_FUNCTIONARY = marked(r"(?P<name>[^>\s]+)>")
_PYTHONIC = either(parse_pythonic, parse_json)
_LLAMA = either(parse_json, parse_pythonic)

# <function name="NAME"><param name="KEY">…</param>…</function>
_NAMED_FUNCTION = markup(
    r'\s*<function name="(?P<name>[^"\n]+)">(?P<body>.*?)</function>\s*(?=<function|\Z)',
    r'<param name="(?P<key>[^"\n]+)">(?P<value>(?:<!\[CDATA\[.*?\]\]>|.*?))</param>(?=\s*(?:<param|\Z))',
)
_NAMED_CLOSER = _unclosed("<param name=", "</param>")
_IN_PARAMETER = _unclosed("<parameter=", "</parameter>")
_IN_INVOKE = _unclosed("parameter name=", "parameter>")
_IN_ARGUMENT = _unclosed("<arg_value>", "</arg_value>")


def _in_gemma_text(text: str) -> bool:
    return text.count('<|"|>') % 2 == 1


@dataclass(frozen=True)
class CallRule:
    """Applies when all `marks` occur in the template; the first that does wins.

    `bare` reads a call without tags that is the whole answer: models that know tags forget them too. `strays` are tags
    that may be left over.
    """

    marks: tuple[str, ...]
    blocks: tuple[Block, ...]
    bare: CallParser = parse_json
    strays: tuple[str, ...] = ()


_QWEN_JSON = _without("<tool_call>", "</tool_call>")
_QWEN_CODER = (
    Block("<tool_call>", "</tool_call>", either(_FUNCTION, _QWEN_JSON), True, _IN_PARAMETER),
    # The outer opening tag is sometimes forgotten.
    Block("<function=", "</function>", _FUNCTION, True, _IN_PARAMETER),
)
_DSML = (
    Block("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _INVOKE, is_open=_IN_INVOKE),
    Block("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _INVOKE, is_open=_IN_INVOKE),
)
_DEEPSEEK_BLOCKS = (
    Block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _DEEPSEEK),
    Block("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _DEEPSEEK),
)
_KIMI_BLOCKS = (
    Block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _KIMI),
    Block("<|tool_call_begin|>", "<|tool_call_end|>", _KIMI),
)
_LFM2 = (Block("<|tool_call_start|>", "<|tool_call_end|>", _PYTHONIC),)
_PHI = (Block("<|tool_call|>", "<|/tool_call|>"), Block("functools"))

_CALLS = (
    CallRule(("｜DSML｜",), _DSML),
    CallRule(("<｜tool▁calls▁begin｜>",), _DEEPSEEK_BLOCKS),
    CallRule(("<|tool_calls_section_begin|>",), _KIMI_BLOCKS),
    CallRule(
        ("<minimax:tool_call>",), (Block("<minimax:tool_call>", "</minimax:tool_call>", _INVOKE, is_open=_IN_INVOKE),)
    ),
    CallRule(("<seed:tool_call>",), (Block("<seed:tool_call>", "</seed:tool_call>", _FUNCTION, True, _IN_PARAMETER),)),
    CallRule(("<function=", "<parameter="), _QWEN_CODER, strays=("</tool_call>",)),
    CallRule(("<arg_key>",), (Block("<tool_call>", "</tool_call>", _ARG_KEY, True, _IN_ARGUMENT),)),
    CallRule(
        ("<function name=", "<param name="), (Block("<function", "</function>", _NAMED_FUNCTION, True, _NAMED_CLOSER),)
    ),
    CallRule(
        ("<|tool_call>", "<tool_call|>"), (Block("<|tool_call>", "<tool_call|>", parse_gemma, is_open=_in_gemma_text),)
    ),
    CallRule(("<|tool_call_start|>",), _LFM2),
    CallRule(("<|tool_list_start|>",), _LFM2),
    CallRule(("<|START_ACTION|>",), (Block("<|START_ACTION|>", "<|END_ACTION|>"),)),
    CallRule(("[TOOL_CALLS]",), (Block("[TOOL_CALLS]", "", _MISTRAL),)),
    CallRule(("<|tools_prefix|>",), (Block("<|tools_prefix|>", "<|tools_suffix|>"),)),
    CallRule(("<TOOLCALL>",), (Block("<TOOLCALL>", "</TOOLCALL>"),)),
    CallRule(("<tool_calls>[",), (Block("<tool_calls>", "</tool_calls>"),)),
    CallRule(("<function_calls>",), (Block("<function_calls>", "</function_calls>", _PYTHONIC),)),
    CallRule(("<tool_call>",), (Block("<tool_call>", "</tool_call>"),)),
    CallRule(("<|/tool_call|>",), _PHI),
    CallRule(("<|tool|>", "<|/tool|>"), _PHI),
    CallRule(("<|tool_call|>",), (Block("<|tool_call|>"),)),
    CallRule(("<|function_call|>",), (Block("<|function_call|>"),)),
    CallRule(("functools[",), (Block("functools"),)),
    CallRule(("<function=",), (Block("<function=", "</function>", _FUNCTIONARY),)),
    CallRule(("Action:", "tool_name"), (Block("Action:", "", _without("```json", "```")),)),
    CallRule(("<|python_start|>",), (Block("<|python_start|>", "<|python_end|>", _LLAMA),), _LLAMA),
    CallRule(("<|python_tag|>",), (Block("<|python_tag|>", "", _LLAMA),), _LLAMA),
)
_GENERIC = CallRule((), (), _LLAMA)

_THINKING = (
    (("[THINK]", "[/THINK]"), Tags("[THINK]", "[/THINK]")),
    (("<|START_THINKING|>",), Tags("<|START_THINKING|>", "<|END_THINKING|>")),
    (("<seed:think>",), Tags("<seed:think>", "</seed:think>")),
    (("<thought>",), Tags("<thought>", "</thought>")),
    (("<mm:think>",), Tags("<mm:think>", "</mm:think>")),
    (("<|inner_prefix|>",), Tags("<|inner_prefix|>", "<|inner_suffix|>")),
    (("<|channel>", "<channel|>"), Tags("<|channel>thought", "<channel|>")),
    (("</think>",), Tags("<think>", "</think>")),
    (("<think>",), Tags("<think>", "</think>")),
)

_WRAPPERS = (
    ("<response>", "</response>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)


def is_harmony(template: str) -> bool:
    """OpenAI's format for gpt-oss, in which every message names its channel."""
    return "<|channel|>" in template and "<|message|>" in template


def thinking_tags(template: str) -> Tags | None:
    return next((tags for marks, tags in _THINKING if all(mark in template for mark in marks)), None)


@functools.lru_cache(maxsize=8)
def syntax_of(template: str, *, has_tools: bool) -> Syntax:
    """How the model writes. Without tools, what looks like a call is text."""
    thinking = thinking_tags(template)
    wrappers = tuple(tag for pair in _WRAPPERS if all(tag in template for tag in pair) for tag in pair)
    if not has_tools:
        return Syntax(thinking, wrappers=wrappers)
    rule = call_rule(template)
    return Syntax(thinking, rule.blocks, rule.bare, (*wrappers, *rule.strays))


def call_rule(template: str) -> CallRule:
    """The generic rule, a call that is the whole answer, where the template shows none of the tags."""
    return next((rule for rule in _CALLS if all(mark in template for mark in rule.marks)), _GENERIC)
