"""The bodies and replies of /api/embed, /api/embeddings, /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from localllm.api.wire import ModelBody, invalid
from localllm.errors import InvalidRequest
from localllm.types import Pooling

# ---- requests ----

Inputs = tuple[str | tuple[int, ...], ...]


class VectorBody(ModelBody, kw_only=True):
    """`pooling` is not Ollama's: it makes vectors with a model that was made to generate text."""

    pooling: Pooling | UnsetType = UNSET


class EmbedBody(VectorBody, kw_only=True):
    input: Any = UNSET
    truncate: bool = True
    dimensions: int = 0


class EmbeddingsBody(VectorBody, kw_only=True):
    """The older route, for one text."""

    prompt: str = ""


class OpenAIEmbeddingsBody(VectorBody, kw_only=True):
    """`truncate`, `options`, `keep_alive` and `pooling` are not OpenAI's."""

    input: Any = UNSET
    encoding_format: str = "float"
    dimensions: int | UnsetType = UNSET
    truncate: bool = False


class RerankBody(VectorBody, kw_only=True):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": (["text"], []), "max_chunks_per_doc": (1,)}

    query: str = ""
    documents: tuple[Any, ...] = ()
    top_n: int | UnsetType = UNSET
    return_documents: bool = False
    truncate: bool = True


def parse_texts(value: Any) -> Inputs:
    """A text or texts, as Ollama takes them; nothing when there is none. Raises InvalidRequest."""
    if value is UNSET or value == "" or value == []:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("invalid input type", hint="Send a string, or a list of strings.", field="input")
    return tuple(texts)


def parse_inputs(value: Any) -> Inputs:
    """Texts or token ids, one or many, as OpenAI takes them. Raises InvalidRequest."""
    if value is UNSET or value == []:
        raise InvalidRequest("invalid input", hint="Send a string, or a list of strings.", field="input")
    inputs = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not isinstance(inputs, list):
        raise invalid("input", "must be a string, a list of token ids, or a list of these")
    for index, input in enumerate(inputs):
        if not isinstance(input, str) and not _is_tokens(input):
            raise invalid(f"input[{index}]", "must be a string or a list of token ids")
    return tuple(input if isinstance(input, str) else tuple(input) for input in inputs)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def parse_documents(values: tuple[Any, ...]) -> tuple[str, ...]:
    """Documents as texts, or as objects with a text. Raises InvalidRequest."""
    documents = []
    for index, value in enumerate(values):
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise invalid(f"documents[{index}]", "must be a string, or an object with a text")
        documents.append(text)
    return tuple(documents)


# ---- replies ----


class EmbedReply(msgspec.Struct, omit_defaults=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OpenAIEmbedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class VectorUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class OpenAIEmbeddings(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[OpenAIEmbedding]
    model: str
    usage: VectorUsage


class Document(msgspec.Struct, kw_only=True):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True, kw_only=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    model: str
    results: list[Ranked]
    usage: VectorUsage


def floats(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def base64_text(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
