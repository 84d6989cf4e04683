"""Loads for an OpenAI-compatible server: closed loops of clients that read the socket themselves.

A client library would take more of a small machine's cores than the servers do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

TEXT = (
    "river stone window market signal garden engine paper copper winter bridge lantern orbit cotton harbor violet "
    "meadow ladder silver thunder marble canyon ribbon anchor"
)
WORDS = TEXT.split()

Messages = list[dict[str, str]]


class _Content(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Content = msgspec.field(default_factory=_Content)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Answer:
    """Times in seconds of one monotonic clock: when the request was sent and when each piece of text came."""

    sent_at: float
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.pieces)]


@dataclass(frozen=True)
class Result:
    """Tokens per second of all clients while all were at work; medians in seconds; the longest gap of a stream."""

    tokens_per_second: float
    ttft: float
    itl: float
    worst_gap: float


async def ask(url: str, model: str, messages: Messages, max_tokens: int, seed: int, **more: Any) -> Answer:
    """One streamed answer. Raises RuntimeError when the server refuses or hangs up."""
    place = urlsplit(url)
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": max_tokens,
        "seed": seed,
        "temperature": 0.8,
        "stream_options": {"include_usage": True},
        **more,
    }
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    answer = Answer(time.perf_counter())
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{url} answered {status.decode().strip()}: {(await reader.read(2000)).decode()[-500:]}")
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise RuntimeError(f"{url} closed the connection")
        if line.startswith(b"data: "):
            _take(_decode(line[6:]), answer)
    writer.close()
    return answer


def _take(chunk: _Chunk, answer: Answer) -> None:
    if chunk.usage is not None:
        answer.num_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        if choice.delta.content:
            answer.pieces.append(time.perf_counter())
            answer.text += choice.delta.content


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def short(number: int) -> Messages:
    """Almost nothing but decoding."""
    return [{"role": "system", "content": "Tell."}, {"role": "user", "content": f"Story {number}"}]


def unique(number: int) -> Messages:
    rng = random.Random(number)
    return [{"role": "user", "content": f"Request {number}. Write a story using these words: {words(rng, 48)}"}]


def shared(number: int) -> Messages:
    """One long system prompt for all, of about 400 tokens, and a question of one's own."""
    rng = random.Random(number)
    return [
        {"role": "system", "content": words(random.Random(1), 384)},
        {"role": "user", "content": f"Question {number}: tell me about {words(rng, 12)}."},
    ]


def copy_task(number: int) -> Messages:
    rng = random.Random(number)
    lines = "\n".join(f"{index}: {words(rng, 6)}" for index in range(8))
    return [{"role": "user", "content": f"Repeat exactly the following lines:\n{lines}"}]


def long_prompt(number: int, num_words: int) -> Messages:
    return [{"role": "user", "content": f"Request {number}. {words(random.Random(number), num_words)}"}]


async def closed_loop(
    url: str,
    model: str,
    prompt: Callable[[int], Messages],
    *,
    clients: int,
    requests: int,
    max_tokens: int,
    seed: int,
    turns: int = 1,
    **more: Any,
) -> Result:
    """`clients` clients, each sending its next request when the last one is answered.

    What counts is the time in which all of them are at work: from the start until the first finds no request left.
    With `turns`, each request goes on as a chat in which the answers are kept.
    """
    numbers = iter(range(seed, seed + requests))
    answers: list[Answer] = []
    ends: list[float] = []

    async def work() -> None:
        for number in numbers:
            messages = prompt(number)
            rng = random.Random(-number)
            for _ in range(turns):
                answer = await ask(url, model, messages, max_tokens, number, **more)
                answers.append(answer)
                again = {"role": "user", "content": f"And now about {words(rng, 12)}?"}
                messages = [*messages, {"role": "assistant", "content": answer.text}, again]
        ends.append(time.perf_counter())

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    end = min(ends)
    return _result(answers, sum(_tokens_until(end, a) for a in answers) / (end - started))


async def gap_of_streams(url: str, model: str, *, seed: int) -> Result:
    """Four streams are under way when a prompt of about 4,000 tokens arrives: what they notice of it."""
    streams = [asyncio.create_task(ask(url, model, unique(seed + i), 160, seed + i)) for i in range(4)]
    await asyncio.sleep(2.5)
    await ask(url, model, long_prompt(seed + 9, 3900), 8, seed)
    answers = [await stream for stream in streams]
    return _result(answers, 0.0)


def _tokens_until(end: float, answer: Answer) -> float:
    """How many of an answer's tokens came before `end`, judged by its pieces."""
    if not answer.pieces:
        return 0.0
    return answer.num_tokens * sum(time <= end for time in answer.pieces) / len(answer.pieces)


def _result(answers: list[Answer], tokens_per_second: float) -> Result:
    spoken = [answer for answer in answers if answer.pieces]
    gaps = [gap for answer in spoken for gap in answer.gaps] or [0.0]
    return Result(tokens_per_second, statistics.median(a.ttft for a in spoken), statistics.median(gaps), max(gaps))
