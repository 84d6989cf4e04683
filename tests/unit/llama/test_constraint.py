"""When a constraint binds and when it does not, on a vocabulary of single bytes."""

from __future__ import annotations

import re
from typing import cast

import numpy
import pytest
from llguidance import LLMatcher, LLTokenizer

from localllm.llama.constraint import Constraint, Gate
from localllm.llama.model import Model

CLOSER = re.compile("</t>")


class Bytes:
    """A vocabulary in which a token is a byte; the last one ends the answer."""

    tokenizer = LLTokenizer("byte")
    num_vocab = tokenizer.vocab_size
    eog_tokens = frozenset({tokenizer.eos_token})

    def piece(self, token: int, *, special: bool) -> bytes:
        return bytes([token])


def constraint(gate: Gate | None = None, *, prefix: str = "", exits: str = "") -> Constraint:
    matcher = LLMatcher(Bytes.tokenizer, LLMatcher.grammar_from_regex("(yes|no)"))
    return Constraint(matcher, cast(Model, Bytes()), gate, list(prefix.encode()), list(exits.encode()))


def allowed(bound: Constraint) -> str:
    """What may come next: its characters, "$" for the end, "*" for anything."""
    logits = numpy.zeros(Bytes.num_vocab, dtype=numpy.float32)
    bound.mask(logits)
    tokens = numpy.flatnonzero(numpy.isfinite(logits))
    if len(tokens) == Bytes.num_vocab:
        return "*"
    return "".join("$" if token in Bytes.eog_tokens else chr(token) for token in tokens)


def write(bound: Constraint, text: str) -> str:
    for token in text.encode():
        bound.accept(token)
    return allowed(bound)


def test_an_answer_is_bound_from_its_first_token_to_its_end() -> None:
    bound = constraint()
    assert allowed(bound) == "ny"
    assert write(bound, "n") == "o"
    assert write(bound, "o") == "$"
    assert bound.error is None


@pytest.mark.parametrize("cut", range(5))
def test_a_thought_is_free_until_its_closing_tag(cut: int) -> None:
    bound = constraint(Gate((), CLOSER, is_inside=True))
    text = "no</t" + ">"
    assert write(bound, text[:cut]) == "*"
    assert write(bound, text[cut:]) == "ny"


def test_a_model_that_may_think_decides_with_its_first_token() -> None:
    gate = Gate(tuple(b"<t>"), CLOSER, is_inside=False)
    assert allowed(constraint(gate)) == "<ny"
    assert write(constraint(gate), "<") == "t"
    assert write(constraint(gate), "<t>") == "*"
    assert write(constraint(gate), "<t>hm</t>") == "ny"
    assert write(constraint(gate), "y") == "e"


def test_what_leads_in_is_written_first() -> None:
    bound = constraint(Gate((), CLOSER, is_inside=True), prefix="[(")
    assert write(bound, "</t>") == "["
    assert write(bound, "[") == "("
    assert write(bound, "(") == "ny"


def test_an_answer_may_be_something_else_that_is_allowed() -> None:
    assert allowed(constraint(exits="!")) == "!ny"
    assert write(constraint(exits="!"), "!") == "*"
    assert write(constraint(exits="!"), "n") == "o"


def test_an_answer_that_went_astray_has_an_error() -> None:
    bound = constraint()
    bound.accept(ord("x"))
    assert bound.error is not None and allowed(bound) == "$"
