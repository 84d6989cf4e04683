"""Which tokens may come next, for an answer that must have a certain form: a mask on the logits, before any sampler."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import llama_cpp as lib
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from localllm.errors import LocalLLMError
from localllm.llama.model import Model

_NUM_COMPILED = 32
# How much of a thought is looked at to find its end.
_TAIL_CHARACTERS = 256


class Pattern(Protocol):
    def search(self, string: str, /) -> object: ...


@dataclass(frozen=True)
class Gate:
    """The constraint begins after `closer`, if the model thinks, which it announces with the tokens of `opener`."""

    opener: tuple[int, ...]
    closer: Pattern
    is_inside: bool


class Grammars:
    """Compiles constraints for one model and keeps the last ones. Used by the reader thread only."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compile = functools.lru_cache(_NUM_COMPILED)(self._match)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes half a second for 50,000 tokens, which only those wait for who want a constraint."""
        vocab = self._model.vocab
        function = ctypes.cast(lib.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined,no-any-return]
            tokens=[self._token(token) for token in range(self._model.num_vocab)],
            vocab_ptr=vocab,
            tokenize_fptr=function,
            eos_token=sorted(self._model.eog_tokens),
        )

    def _token(self, token: int) -> bytes:
        """The bytes of a token, after 0xff for one that is no text: a grammar never means it by its looks."""
        piece = self._model.piece(token, special=True)
        attributes = lib.llama_vocab_get_attr(self._model.vocab, token)
        is_tag = attributes & lib.LLAMA_TOKEN_ATTR_USER_DEFINED and piece[:1] == b"<" and piece[-1:] == b">"
        return b"\xff" + piece if attributes & lib.LLAMA_TOKEN_ATTR_CONTROL or is_tag else piece

    def _match(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), f"a checked grammar was refused: {matcher.get_error()}"
        return matcher

    def constrain(
        self, grammar: str, gate: Gate | None, prefix: Sequence[int], exits: Sequence[int] = ()
    ) -> Constraint:
        """`grammar` is in llguidance's form and was checked; the tokens of `prefix` come before what it describes.

        An answer that begins with a token of `exits` is something else and free.
        """
        return Constraint(self._compile(grammar).deep_copy(), self._model, gate, prefix, exits)


class _State(Enum):
    THINKING = auto()
    UNDECIDED = auto()
    BEGINNING = auto()
    ANSWER = auto()
    FREE = auto()


class Constraint:
    """Follows one sequence. Belongs to the engine's thread."""

    def __init__(
        self, matcher: LLMatcher, model: Model, gate: Gate | None, prefix: Sequence[int], exits: Sequence[int]
    ) -> None:
        self._exits = frozenset(exits)
        self._matcher = matcher
        self._model = model
        self._gate = gate
        self._prefix = list(prefix)
        # What is left of an opening tag that was begun.
        self._opening: list[int] = []
        self._tail = ""
        self._bits = allocate_token_bitmask(1, model.num_vocab)
        self._eog = np.array(sorted(model.eog_tokens), dtype=np.int64)
        if gate is None:
            self._state = _State.BEGINNING
        else:
            self._state = _State.THINKING if gate.is_inside else _State.UNDECIDED

    @property
    def error(self) -> LocalLLMError | None:
        """Why the answer is not what it should be, although it has ended."""
        if not self._matcher.is_error():
            return None
        return LocalLLMError(
            f"the answer could not be kept to its form: {self._matcher.get_error()[:300]}",
            hint="Use a simpler schema or grammar.",
        )

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        """Take what may not come next out of the running."""
        if self._state in (_State.THINKING, _State.FREE) and not self._opening:
            return
        allowed = self._allowed()
        if self._state is _State.UNDECIDED and self._gate is not None:
            allowed[list(self._gate.opener[:1])] = True
        if self._state in (_State.UNDECIDED, _State.BEGINNING):
            allowed[list(self._exits)] = True
        logits[~allowed] = -np.inf

    def _allowed(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(self._model.num_vocab, dtype=np.bool_)
        if lead := self._opening or self._prefix:
            allowed[lead[0]] = True
        elif self._matcher.is_stopped():
            allowed[self._eog] = True
        else:
            fill_next_token_bitmask(self._matcher, self._bits, 0)
            bits = np.unpackbits(self._bits.view(np.uint8).reshape(-1), count=len(allowed), bitorder="little")
            allowed = bits.view(np.bool_)
        return allowed

    def accept(self, token: int) -> None:
        """Go on with `token`, which `mask` allowed."""
        if self._state is _State.UNDECIDED:
            assert self._gate is not None
            is_opener = self._gate.opener[:1] == (token,)
            self._state = _State.THINKING if is_opener else _State.BEGINNING
            self._opening = list(self._gate.opener) if is_opener else []
        if self._state is _State.BEGINNING:
            self._state = _State.FREE if token in self._exits else _State.ANSWER
        if self._opening:
            self._opening.pop(0)
        elif self._state is _State.THINKING:
            self._watch(token)
        elif self._state is _State.ANSWER:
            self._advance(token)

    def _advance(self, token: int) -> None:
        if self._prefix:
            self._prefix.pop(0)
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def _watch(self, token: int) -> None:
        """The end of a thought is told from its text: not every vocabulary has a token for it."""
        assert self._gate is not None
        self._tail += self._model.piece(token, special=True).decode("utf-8", "replace")
        if self._gate.closer.search(self._tail):
            self._state = _State.BEGINNING
        self._tail = self._tail[-_TAIL_CHARACTERS:]
