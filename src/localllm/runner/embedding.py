"""The engine for vectors: inputs of all requests, taken in turns, packed into as few decodes as make sense."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from localllm.errors import ContextExceeded, InvalidRequest, LocalLLMError, Unsupported
from localllm.llama.embedder import (
    MAX_PACKED_INPUTS,
    PACKED_TOKENS,
    Embedder,
    Vector,
    is_reranker,
    max_input_tokens,
)
from localllm.llama.model import Model
from localllm.protocol.messages import Done, Embedded, Failed, Output, Outputs, Prefill
from localllm.types import Embeddings, EmbedRequest, Finished, LoadOptions, Pooling, Timings, Usage

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request on its way. Its inputs are taken in order, and a batch need not take all of them."""

    request: EmbedRequest
    inputs: list[list[int]]
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    num_taken: int = 0
    num_computed_tokens: int = 0
    vectors: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


def pack(jobs: Sequence[Job]) -> list[tuple[Job, list[int]]]:
    """Take the inputs of the next decode from `jobs`, one of each in turn. An input over the budget goes alone."""
    taken: list[tuple[Job, list[int]]] = []
    room = PACKED_TOKENS
    open_jobs = list(jobs)
    while open_jobs and len(taken) < MAX_PACKED_INPUTS:
        job = open_jobs.pop(0)
        tokens = job.inputs[job.num_taken]
        if len(tokens) > room and taken:
            continue
        job.num_taken += 1
        taken.append((job, tokens))
        room -= len(tokens)
        if job.num_taken < len(job.inputs):
            open_jobs.append(job)
    return taken


class EmbeddingEngine:
    """`submit` and `cancel` belong to the reader's thread, `run` to another."""

    def __init__(self, model: Model, options: LoadOptions, send: Callable[[Outputs], object]) -> None:
        self._model = model
        self._options = options
        self._send = send
        self.max_tokens = max_input_tokens(model, options)
        self._inbox: queue.SimpleQueue[Job | str | int] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._embedders: dict[Pooling | None, Embedder] = {}

    def load(self) -> None:
        """Make room for the model's own way of pooling now, not with the first request. Raises LoadFailed."""
        self._embedders[None] = Embedder(self._model, self._options, None)

    def submit(self, request: EmbedRequest) -> None:
        """Raises InvalidRequest, Unsupported, or ContextExceeded with both numbers."""
        self._check(request)
        job = Job(request, [self._tokens(request, index, input) for index, input in enumerate(request.inputs)])
        self._inbox.put(job)

    def cancel(self, id: str) -> None:
        self._inbox.put(id)

    def set_threads(self, num_threads: int) -> None:
        self._inbox.put(num_threads)

    def run(self) -> None:
        """Work until the process ends. Raises DecodeError when llama.cpp is beyond repair."""
        while True:
            self.step()

    def step(self) -> None:
        """Take in what arrived (waiting for it when idle), then compute one batch."""
        items: list[Output] = []
        while not self._jobs or not self._inbox.empty():
            self._take_in(self._inbox.get(), items)
            if items:
                break
        if self._jobs:
            self._compute(items)
        self._send(Outputs(items))

    def _take_in(self, event: Job | str | int, items: list[Output]) -> None:
        if isinstance(event, int):
            self._options = msgspec.structs.replace(self._options, num_threads_batch=event)
            for embedder in self._embedders.values():
                embedder.set_threads(event)
        elif isinstance(event, Job):
            self._jobs[event.request.id] = event
            if not event.inputs:
                self._finish(event, items)
        elif self._jobs.pop(event, None) is not None:
            items.append(Done(event, Finished("cancelled")))

    def _compute(self, items: list[Output]) -> None:
        """One batch, of the requests that are pooled like the oldest one."""
        pooling = next(iter(self._jobs.values())).request.pooling
        jobs = [job for job in self._jobs.values() if job.request.pooling == pooling]
        started_ns = time.monotonic_ns()
        try:
            embedder = self._embedder(pooling)
        except LocalLLMError as error:
            for job in jobs:
                self._fail(job, error, items)
            return
        taken = pack(jobs)
        vectors = embedder.compute([tokens for _, tokens in taken])
        for (job, tokens), vector in zip(taken, vectors, strict=True):
            job.started_ns = job.started_ns or started_ns
            job.num_computed_tokens += len(tokens)
            self._take_vector(job, vector, items)
        for job in dict.fromkeys(job for job, _ in taken):
            if job.request.id not in self._jobs:
                continue
            # Whoever was served goes behind those that were not.
            self._jobs[job.request.id] = self._jobs.pop(job.request.id)
            items.append(Prefill(job.request.id, job.num_computed_tokens, job.num_tokens))
            if len(job.vectors) == len(job.inputs):
                self._finish(job, items)

    def _embedder(self, pooling: Pooling | None) -> Embedder:
        if pooling not in self._embedders:
            self._embedders[pooling] = Embedder(self._model, self._options, pooling)
        return self._embedders[pooling]

    def _take_vector(self, job: Job, vector: Vector, items: list[Output]) -> None:
        if not np.isfinite(vector).all():
            message = f"the model's answer to input {len(job.vectors)} is not a number"
            self._fail(job, InvalidRequest(message, field=f"input[{len(job.vectors)}]"), items)
        elif job.request.query is not None:
            job.vectors.append(_score(vector).astype("<f4").tobytes())
        else:
            job.vectors.append(_unit(vector[: job.request.dimensions]).astype("<f4").tobytes())

    def _finish(self, job: Job, items: list[Output]) -> None:
        del self._jobs[job.request.id]
        now = time.monotonic_ns()
        started_ns = job.started_ns or now
        result = Embeddings(
            vectors=tuple(job.vectors),
            usage=Usage(num_prompt_tokens=job.num_tokens),
            timings=Timings(queue_ns=started_ns - job.arrived_ns, prefill_ns=now - started_ns),
        )
        items.append(Embedded(job.request.id, result))

    def _fail(self, job: Job, error: LocalLLMError, items: list[Output]) -> None:
        if self._jobs.pop(job.request.id, None) is not None:
            items.append(Failed(job.request.id, error.info()))

    # ---- what needs no computing: in the reader's thread ----

    def _check(self, request: EmbedRequest) -> None:
        if request.query is not None:
            if not is_reranker(self._model):
                raise Unsupported("the model does not support reranking", hint="Use a model that was made for it.")
            return
        if is_reranker(self._model):
            raise Unsupported("the model does not support embeddings: it ranks", hint="Use /v1/rerank.")
        if self._model.pooling_type is None and request.pooling is None:
            raise Unsupported(
                "the model does not support embeddings: it was made to generate text",
                hint='Use a model for embeddings, or ask for "pooling": "mean" or "last".',
            )
        if request.dimensions is not None and not 0 < request.dimensions <= self._model.num_embedding:
            raise InvalidRequest(
                f'"dimensions": is {request.dimensions}, and the model\'s vectors have {self._model.num_embedding}',
                field="dimensions",
            )

    def _tokens(self, request: EmbedRequest, index: int, input: str | tuple[int, ...]) -> list[int]:
        where = f"input[{index}]"
        if not isinstance(input, str):
            tokens = list(input)
            if not all(0 <= token < self._model.num_vocab for token in tokens):
                raise InvalidRequest(f'"{where}" has a token that the model does not have', field=where)
        elif request.query is not None:
            tokens = self._model.tokenize_pair(request.query, input)
        else:
            tokens = self._model.tokenize(input, add_special=True)
        if not tokens:
            raise InvalidRequest(f'"{where}" has no tokens', hint="Send some text.", field=where)
        return self._shorten(tokens, request, where) if len(tokens) > self.max_tokens else tokens

    def _shorten(self, tokens: list[int], request: EmbedRequest, where: str) -> list[int]:
        """Cut the end off, but not the token that marks it. Raises ContextExceeded when that may not be, or no help."""
        special = self._model.tokenize("", add_special=True)
        num_kept = self.max_tokens - 1 if special and tokens[-1] == special[-1] else self.max_tokens
        if request.truncate and num_kept >= len(special):
            return [*tokens[:num_kept], *tokens[len(tokens) - (self.max_tokens - num_kept) :]]
        what = "input after truncation exceeds maximum" if request.truncate else "the input length exceeds the"
        raise ContextExceeded(
            f"{what} context length: {where} has {len(tokens)} tokens and the window holds {self.max_tokens}",
            hint="Send shorter texts, let them be truncated, or load the model with a larger num_ctx.",
            num_prompt_tokens=len(tokens),
            num_ctx=self.max_tokens,
            field=where,
        )


def _unit(vector: Vector) -> Vector:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector


def _score(vector: Vector) -> Vector:
    """Between 0 and 1. A model with several classes has made probabilities of them; a single one is a logit."""
    return vector[:1] if len(vector) > 1 else np.float32(1) / (1 + np.exp(-np.clip(vector, -80, 80)))
