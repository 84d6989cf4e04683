"""Which language a chat template is written in: Jinja, or Go's text/template, as Ollama's are."""

from __future__ import annotations

import re

from localllm.types import PromptTemplate

# What only Go has behind the braces: a field or variable, a keyword, a comment, or a function before an operand.
_GO_ACTION = re.compile(
    r"\{\{-?\s*(?:\.|\$|/\*|\(\s*\.|\(\s*[a-z]+\s+[.$(]|(?:if|range|with|define|template|block)\s|(?:end|else|break|continue)\b"
    r"|(?:json|len|index|slice|print|printf|println|eq|ne|lt|le|gt|ge|and|or|not|call|toTypeScriptType)\s+[.$(\"`]"
    r"|(?:currentDate|yesterdayDate)\s*-?\}\})"
)


def prompt_template(source: str) -> PromptTemplate:
    """`source` with its language."""
    return PromptTemplate("go" if _GO_ACTION.search(source) else "jinja", source)
