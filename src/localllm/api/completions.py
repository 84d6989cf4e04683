"""/v1/completions: text that goes on from where a prompt ends, with no chat around it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation, logprobs, shape
from localllm.api.errors import openai_event
from localllm.api.generation import Ended, Job, Services
from localllm.api.openai import FALLBACKS, FINGERPRINT, usage_of
from localllm.api.openai_request import options_of, variants
from localllm.api.options import parse_keep_alive, parse_options
from localllm.api.progress import commentator
from localllm.api.streaming import SSE, StreamingReply, WhileConnected
from localllm.api.turn import turn_of
from localllm.api.wire import decode, invalid, json_bytes, json_response, read_body
from localllm.api.wire_openai import CompletionBody, TextChoice, TextCompletion, Usage
from localllm.types import ChatRequest, Delta

_MAX_TOKEN = 2**31 - 1
# OpenAI's, which is little; a client that wants more says so.
_MAX_TOKENS = 16
_MAX_PROMPTS = 128


class CompletionRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models

    async def create(self, request: Request) -> Response | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), CompletionBody)
        jobs = await self._jobs(request, body, started_ns)
        new = _NewCompletion(body, jobs)
        if body.stream:
            beat = commentator(self._supervisor, jobs[0].request.id)
            return StreamingReply(self._chunks(jobs, new, body.stream_options.include_usage), SSE, openai_event, beat)
        async with WhileConnected(request.receive):
            answers = await generation.answers(self._supervisor, jobs)
        choices = [new.choice(index, a.delta, a.ended.finished.finish_reason) for index, a in enumerate(answers)]
        return json_response(new.make(choices, new.usage([a.ended for a in answers])))

    async def _jobs(self, request: Request, body: CompletionBody, started_ns: int) -> list[Job]:
        """For each prompt as many as there are answers wanted, in this order."""
        if not body.model:
            raise invalid("model", "is required")
        _check(body)
        prompts, grammar = parse_prompts(body.prompt), shape.choose(None, grammar=body.grammar, regex=body.regex)
        keep_alive = parse_keep_alive(body.keep_alive)
        model = await self._models.find(body.model)
        generation.check_capability(model, body.model, "completions")
        sampling, wishes = parse_options(model.parameters, options_of(body), {**FALLBACKS, "num_predict": _MAX_TOKENS})
        base = ChatRequest(
            id="",
            suffix=body.suffix,
            sampling=sampling,
            num_top_logprobs=None if body.logprobs is UNSET else body.logprobs,
            grammar=grammar,
            **turn_of(body).fields(request),
        )
        job = Job(body.model, model, base, wishes, keep_alive, started_ns)
        return [
            replace(job, request=variant)
            for prompt in prompts
            for variant in variants(
                msgspec.structs.replace(base, id=generation.new_id(), prompt=prompt.text, context_tokens=prompt.tokens),
                body.n,
            )
        ]

    async def _chunks(self, jobs: list[Job], new: _NewCompletion, include_usage: bool) -> AsyncGenerator[bytes, None]:
        ended: list[Ended] = []
        async with aclosing(generation.choices(self._supervisor, jobs)) as stream:
            async for index, event in stream:
                if isinstance(event, Ended):
                    ended.append(event)
                    choice = new.choice(index, Delta(), event.finished.finish_reason)
                else:
                    choice = new.choice(index, event, None)
                yield _event(new.make([choice]))
        if include_usage:
            yield _event(new.make([], new.usage(ended)))
        yield b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Prompt:
    text: str = ""
    tokens: tuple[int, ...] = ()


def parse_prompts(value: Any) -> list[Prompt]:
    """Raises InvalidRequest for anything but text, tokens, or a list of either."""
    if isinstance(value, str):
        return [Prompt(value)]
    if isinstance(value, list) and value and len(value) <= _MAX_PROMPTS:
        if all(isinstance(item, str) for item in value):
            return [Prompt(item) for item in value]
        if all(_are_tokens(item) for item in value):
            return [Prompt(tokens=tuple(item)) for item in value]
    if _are_tokens(value):
        return [Prompt(tokens=tuple(value))]
    raise invalid("prompt", f"must be text, token ids, or a list of at most {_MAX_PROMPTS} of either")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_token, value))


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN


def _check(body: CompletionBody) -> None:
    if body.logprobs is not UNSET and not 0 <= body.logprobs <= logprobs.MAX_TOP_LOGPROBS:
        raise invalid("logprobs", f"must be between 0 and {logprobs.MAX_TOP_LOGPROBS}")
    if body.best_of is not UNSET and body.best_of != body.n:
        raise invalid("best_of", "other than n is not supported", hint="Ask for n answers and choose among them.")
    if body.echo and (body.logprobs is not UNSET or not _is_text(body.prompt)):
        raise invalid("echo", "is supported for text, and without logprobs")


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(item, str) for item in prompt))


def _event(chunk: TextCompletion) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"


class _NewCompletion:
    """Makes one reply: whole, or as chunks that belong together by their id."""

    def __init__(self, body: CompletionBody, jobs: Sequence[Job]) -> None:
        self._body = body
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        # What an answer begins with, and how many characters of it have been shown.
        self._leads = [job.request.prompt or "" if body.echo else "" for job in jobs]
        self._offsets = [0 for _ in jobs]

    def choice(self, index: int, delta: Delta, finish_reason: str | None) -> TextChoice:
        text, self._leads[index] = self._leads[index] + delta.content, ""
        shown = logprobs.completion(delta.logprobs, first_offset=self._offsets[index]) if delta.logprobs else None
        self._offsets[index] += len(text)
        return TextChoice(text=text, index=index, logprobs=shown, finish_reason=finish_reason)

    def usage(self, ended: Sequence[Ended]) -> Usage:
        """Answers to one prompt count it once."""
        usage = usage_of(ended)
        num_more = sum(one.finished.usage.num_prompt_tokens for one in ended) // self._body.n - usage.prompt_tokens
        usage.prompt_tokens += num_more
        usage.total_tokens += num_more
        return usage

    def make(self, choices: list[TextChoice], usage: Any = UNSET) -> TextCompletion:
        return TextCompletion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._body.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        )
