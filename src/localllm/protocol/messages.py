"""Every message that crosses between the daemon and a runner.

Life of a channel: the daemon sends `Load` once; the runner answers with any number of `LoadProgress` and then exactly
one of `Loaded` and `LoadFailed`. After `Loaded`, each `Chat` ends with exactly one `Done` or `Failed`, and each `Embed`
with one `Embedded` or `Failed`, inside some `Outputs` frame; a cancelled request ends with
`Done(finish_reason="cancelled")`. `Cancel` for an unknown or finished id is not an error. Closing the socket ends the
runner; an `Unload` before that lets it keep what is worth keeping.
"""

from __future__ import annotations

import msgspec

from localllm.errors import ErrorInfo
from localllm.types import ChatRequest, Delta, Embeddings, EmbedRequest, EngineStats, Finished, LoadOptions, RunnerInfo


class Load(msgspec.Struct, frozen=True, tag="load"):
    """`chat_template` overrides the Jinja template inside the model file when it is not empty."""

    model_path: str
    options: LoadOptions
    chat_template: str = ""


class Chat(msgspec.Struct, frozen=True, tag="chat"):
    request: ChatRequest


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    request: EmbedRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: str


class SetThreads(msgspec.Struct, frozen=True, tag="set_threads"):
    """Compute with so many threads from the next step on."""

    num_threads: int


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Sent before the daemon hangs up in peace: the runner may take a moment to write its prefix cache to disk."""


Command = Load | Chat | Embed | Cancel | SetThreads | Unload


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """`fraction` is between 0 and 1."""

    fraction: float


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    info: RunnerInfo


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    error: ErrorInfo


class Text(msgspec.Struct, frozen=True, tag="text"):
    id: str
    delta: Delta


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """How far a prompt has got; sent after each step that computed a part of it."""

    id: str
    num_computed_tokens: int
    num_prompt_tokens: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    id: str
    finished: Finished


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    id: str
    embeddings: Embeddings


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: str
    error: ErrorInfo


Output = Text | Prefill | Done | Embedded | Failed


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one engine step has to say, in one frame."""

    items: list[Output]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent about once a second while the engine works, and when it has nothing more to do."""

    stats: EngineStats


Event = LoadProgress | Loaded | LoadFailed | Outputs | Stats
