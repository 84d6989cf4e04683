"""From a ChatRequest to a sequence that the engine can run: render, tokenise, check the length."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from localllm.chat.formats import forced_parser, parser_for
from localllm.chat.history import drop_oldest, render
from localllm.chat.template import ChatTemplate
from localllm.errors import ContextExceeded, InvalidRequest, Unsupported
from localllm.llama.model import Model
from localllm.llama.sampler import Sampler
from localllm.runner.constrain import Constrainer
from localllm.runner.engine import Arrival
from localllm.runner.output import LiveRequest
from localllm.runner.sequence import Sequence
from localllm.runner.speculate import Drafter
from localllm.runner.text import TextStream
from localllm.types import ChatRequest, Finished, Message, Usage

# How many windows an answer may fill that is not bounded otherwise.
_MAX_SHIFTED_WINDOWS = 10


@dataclass(frozen=True)
class _Prompt:
    text: str
    tokens: list[int]
    num_dropped_messages: int = 0
    num_dropped_tokens: int = 0


class Preparer:
    """Owns the compiled chat template. Used by the reader thread only."""

    def __init__(
        self, model: Model, num_ctx: int, template_source: str, *, speculates: bool, can_shift: bool = False
    ) -> None:
        self._model = model
        self._can_shift = can_shift
        self._speculates = speculates
        self._num_ctx = num_ctx
        self._template = ChatTemplate(template_source, bos_token=model.bos_text, eos_token=model.eos_text)
        self._constrainer = Constrainer(model, self._template.source)

    def inspect(self, request: ChatRequest) -> Finished:
        """What `prepare` would have the engine compute, however long it is. Raises as `prepare`."""
        prompt = self._read(request, request.messages)
        before = self._model.detokenize(request.context_tokens, special=True).decode("utf-8", "replace")
        usage = Usage(num_prompt_tokens=len(prompt.tokens))
        return Finished("stop", usage, tokens=tuple(prompt.tokens), prompt=before + prompt.text)

    def prepare(self, request: ChatRequest) -> tuple[LiveRequest, Arrival]:
        """Raises ContextExceeded with both numbers, TemplateError, or InvalidRequest."""
        if request.shift and not self._can_shift:
            raise Unsupported("this model's window cannot be shifted", hint="Leave shift out.", field="shift")
        compiled = self._constrainer.check(request)
        prompt = self._fit(request)
        constraint = self._constrainer.constrain(request, compiled, prompt.text)
        sequence = Sequence(
            id=request.id,
            tokens=prompt.tokens,
            max_tokens=self._max_tokens(request, len(prompt.tokens)),
            arrived_at=time.monotonic(),
            eog_tokens=self._model.eog_tokens,
            priority=request.priority,
            client=request.client,
            is_pinned=request.pin,
            drafter=Drafter(prompt.tokens) if self._speculates and request.speculate else None,
            window=self._num_ctx if request.shift else None,
            num_keep=self._num_keep(request, len(prompt.tokens)),
            num_dropped_tokens=prompt.num_dropped_tokens,
        )
        sampler = Sampler(
            *(self._model, request.sampling, prompt.tokens, self._num_ctx),
            num_top_logprobs=request.num_top_logprobs,
            constraint=constraint,
        )
        text = self._text_stream(request, prompt.text, sampler)
        live = LiveRequest(sequence, text, request.return_tokens, prompt.num_dropped_messages, constraint)
        return live, Arrival(sequence, sampler)

    def _max_tokens(self, request: ChatRequest, num_prompt_tokens: int) -> int:
        num_predict = request.sampling.num_predict
        # One that may go on for ever must end some time: Ollama's bound.
        longest = _MAX_SHIFTED_WINDOWS * self._num_ctx if request.shift else self._num_ctx
        if num_predict is None or num_predict < 0:
            return longest
        return min(longest, num_prompt_tokens + num_predict)

    def _num_keep(self, request: ChatRequest, num_prompt_tokens: int) -> int:
        """How many tokens of the prompt stay for good, at most three quarters of the window."""
        asked = request.sampling.num_keep
        return min(num_prompt_tokens if asked < 0 else asked, num_prompt_tokens, self._num_ctx * 3 // 4)

    def _text_stream(self, request: ChatRequest, prompt: str, sampler: Sampler) -> TextStream:
        is_chat = request.messages is not None
        make = forced_parser if request.forced_tools else parser_for
        source = self._template.source if is_chat else ""
        parser = make(source, tools=request.tools, think=request.think, prompt=prompt)
        piece = functools.partial(self._model.piece, special=parser.needs_special_tokens)
        stops, logprobs = request.sampling.stop, sampler.logprobs
        return TextStream(piece, stops, parser, logprobs, max_tool_calls=request.max_tool_calls)

    def _fit(self, request: ChatRequest) -> _Prompt:
        """The prompt, shortened by whole messages if the request allows it and the window demands it."""
        messages, num_dropped = request.messages, 0
        while True:
            prompt = self._read(request, messages)
            if not prompt.tokens:
                raise InvalidRequest("the prompt is empty", hint="Send some text.")
            if len(prompt.tokens) < self._num_ctx:
                return dataclasses.replace(prompt, num_dropped_messages=num_dropped)
            shorter = drop_oldest(messages) if request.truncate and messages else None
            if shorter is None and request.truncate and request.shift:
                return dataclasses.replace(self._shorten(prompt, request), num_dropped_messages=num_dropped)
            if shorter is None:
                raise self._too_long(len(prompt.tokens))
            num_dropped += len(messages or ()) - len(shorter)
            messages = shorter

    def _shorten(self, prompt: _Prompt, request: ChatRequest) -> _Prompt:
        """The first tokens and the last ones, such that half of the rest of the window is left for the answer."""
        num_keep = self._num_keep(request, len(prompt.tokens))
        num_last = max(1, (self._num_ctx - num_keep) // 2)
        tokens = prompt.tokens[:num_keep] + prompt.tokens[-num_last:]
        return _Prompt(prompt.text, tokens, num_dropped_tokens=len(prompt.tokens) - len(tokens))

    def _read(self, request: ChatRequest, messages: Sequences[Message] | None) -> _Prompt:
        text = self._render(request, messages)
        add_special = request.add_special and not request.context_tokens
        return _Prompt(text, [*request.context_tokens, *self._tokenize(text, add_special=add_special)])

    def _render(self, request: ChatRequest, messages: Sequences[Message] | None) -> str:
        if messages is None:
            return self._infill(request) if request.suffix else request.prompt or ""
        return render(self._template, messages, tools=request.tools, think=request.think)

    def _infill(self, request: ChatRequest) -> str:
        prompt = self._model.infill(request.prompt or "", request.suffix)
        if prompt is None:
            raise Unsupported(
                "the model does not support insert: its vocabulary has no tokens for filling in",
                hint="Leave suffix out, or use a model for code.",
                field="suffix",
            )
        return prompt

    def _tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """BOS exactly once: not after an earlier exchange, and not when the template has written it already."""
        has_bos = bool(self._model.bos_text) and text.startswith(self._model.bos_text)
        return self._model.tokenize(text, add_special=add_special and not has_bos)

    def _too_long(self, num_tokens: int) -> ContextExceeded:
        return ContextExceeded(
            f"the prompt is longer than the context length: it has {num_tokens} tokens and the window holds "
            f"{self._num_ctx}, of which at least one must be left for the answer",
            hint="Shorten the prompt or load the model with a larger num_ctx.",
            num_prompt_tokens=num_tokens,
            num_ctx=self._num_ctx,
        )
