"""A runner process: load one model, then answer requests until the daemon closes the channel.

Three threads work: the main one loads and then is the engine, the reader prepares requests, the output thread writes
deltas. A fourth watches the channel, whose end ends the process at once, whatever is being computed: that is how
unloading, cancelling a load and the daemon's death all work, and why nothing here needs to be freed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from localllm import log
from localllm.errors import LoadFailed, LocalLLMError, RunnerCrashed, Unsupported
from localllm.llama import library
from localllm.llama.context import MAX_DRAFT_ROWS, Context
from localllm.llama.model import Model
from localllm.protocol import messages
from localllm.protocol.channel import Channel
from localllm.protocol.messages import Cancel, Chat, Command, Embed, Event, Load, SetThreads, Unload
from localllm.runner.cost import StepCost
from localllm.runner.embedding import EmbeddingEngine
from localllm.runner.engine import Ending, Engine, Inbox, Retuned
from localllm.runner.kv_files import KVFiles
from localllm.runner.kv_tiers import KVTiers
from localllm.runner.output import OutputThread
from localllm.runner.prefix_cache import PrefixCache
from localllm.runner.prepare import Preparer
from localllm.runner.scheduler import Scheduler
from localllm.types import ChatRequest, EmbedRequest, LoadOptions, RunnerInfo

_log = logging.getLogger(__name__)

# The engine must get the interpreter back quickly after each native call; the default of 5 ms is a whole step.
_SWITCH_INTERVAL_SECONDS = 0.0002

# How long an unloading runner may go on to write its prefix cache. The daemon's patience is longer.
_FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class _Queues:
    """What the thread that reads the channel feeds: the preparing thread, and at the end the engine."""

    requests: queue.SimpleQueue[Chat | Embed | Cancel | SetThreads] = field(default_factory=queue.SimpleQueue)
    inbox: Inbox = field(default_factory=queue.SimpleQueue)
    is_serving: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class _Takers:
    """What the preparing thread does with each kind of command; the first two raise LocalLLMError."""

    chat: Callable[[ChatRequest], None]
    embed: Callable[[EmbedRequest], None]
    cancel: Callable[[str], None]
    set_threads: Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="localllm.runner", description="Started by the daemon; not for people.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the daemon")
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    # A Ctrl+C reaches the daemon's whole process group, and a service manager's SIGTERM its whole control group: the
    # daemon alone decides what they mean for answers in progress. It ends a runner by closing the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.setup(debug=arguments.debug, name="runner")
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    channel: Channel[Event, Command] = Channel(socket.socket(fileno=arguments.fd), Command)
    load = channel.receive()
    if not isinstance(load, Load):
        return
    queues = _Queues()
    threading.Thread(target=_read, args=(channel, queues), name="channel", daemon=True).start()
    try:
        _serve(channel, load, queues)
    except Exception:
        _log.exception("the engine stopped")
        _leave(1)


def _read(channel: Channel[Event, Command], queues: _Queues) -> None:
    """Pass requests on until the daemon hangs up, then end the process, at once if it said no word before."""
    is_in_peace = False
    with contextlib.suppress(Exception):
        while (command := channel.receive()) is not None:
            assert not isinstance(command, Load), "a runner loads once"
            if isinstance(command, Unload):
                is_in_peace = True
            else:
                queues.requests.put(command)
    if is_in_peace and queues.is_serving.is_set():
        done = threading.Event()
        queues.inbox.put(Ending(_FLUSH_SECONDS, done.set))
        done.wait(_FLUSH_SECONDS)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End without clean-up: native threads may be in the middle of a step, and the system reclaims everything."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)


def _serve(channel: Channel[Event, Command], load: Load, queues: _Queues) -> None:
    try:
        model = _load(channel, load)
        embeddings = EmbeddingEngine(model, load.options, channel.send)
        if model.pooling_type is None:
            context = Context(model, load.options)
            template = load.chat_template or model.chat_template
            speculates, can_shift = load.options.speculate, context.can_shift
            preparer = Preparer(model, context.num_ctx, template, speculates=speculates, can_shift=can_shift)
        else:
            embeddings.load()
    except LocalLLMError as error:
        channel.send(messages.LoadFailed(error.info()))
        _leave(1)
    if model.pooling_type is None:
        _generate(channel, load, queues, model, context, preparer, embeddings)
    else:
        _start_reader(
            channel, queues, _Takers(_refuse_chat, embeddings.submit, embeddings.cancel, embeddings.set_threads)
        )
        channel.send(messages.Loaded(_info(model, load.options, num_slots=1, num_ctx=embeddings.max_tokens)))
        embeddings.run()


def _refuse_chat(request: ChatRequest) -> None:
    raise Unsupported("the model does not generate text", hint="It is a model for embeddings.")


def _generate(
    channel: Channel[Event, Command],
    load: Load,
    queues: _Queues,
    model: Model,
    context: Context,
    preparer: Preparer,
    embeddings: EmbeddingEngine,
) -> None:
    """Be the engine of a model that generates text; vectors, where somebody wants some of it, are made beside."""
    options = load.options
    cache = PrefixCache(
        context.num_slots,
        can_cut=context.can_cut,
        can_cut_snapshots=not context.num_window,
        snapshot_budget=options.kv_ram_bytes,
    )
    cost = StepCost(options.target_itl_ms / 1000)
    scheduler = Scheduler(
        cache=cache,
        max_batch_tokens=context.batch.capacity,
        cost=cost,
        can_cut=context.can_cut,
        can_swap=context.can_swap,
        max_drafts=MAX_DRAFT_ROWS,
    )
    tiers = KVTiers(context, cache, _files(load, queues.inbox), context.num_ctx)
    output = OutputThread(channel.send, lambda id: engine.cancel(id))
    engine = Engine(context, scheduler, cache, output.report, queues.inbox, tiers, cost)

    def chat(request: ChatRequest) -> None:
        if request.inspect:
            channel.send(messages.Outputs([messages.Done(request.id, preparer.inspect(request))]))
            return
        live, arrival = preparer.prepare(request)
        output.register(live)
        queues.inbox.put(arrival)

    def cancel(id: str) -> None:
        engine.cancel(id)
        embeddings.cancel(id)

    def set_threads(num_threads: int) -> None:
        queues.inbox.put(Retuned(num_threads))
        embeddings.set_threads(num_threads)

    output.start()
    threading.Thread(target=_run_beside, args=(embeddings,), name="embeddings", daemon=True).start()
    _start_reader(channel, queues, _Takers(chat, embeddings.submit, cancel, set_threads))
    queues.is_serving.set()
    channel.send(messages.Loaded(_info(model, options, num_slots=context.num_slots, num_ctx=context.num_ctx)))
    engine.run()


def _run_beside(embeddings: EmbeddingEngine) -> None:
    try:
        embeddings.run()
    except Exception:
        _log.exception("the engine for embeddings stopped")
        _leave(1)


def _files(load: Load, inbox: Inbox) -> KVFiles | None:
    """The prefix cache on disk, for memories of exactly this kind: model, types and library."""
    options = load.options
    if not options.kv_disk_bytes:
        return None
    path = Path(load.model_path)
    # A blob is named by its content; any other file is known by its place, size and time.
    name = path.name if path.name.startswith("sha256-") else f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}"
    kind = [name, options.kv_cache_type, options.flash_attention, options.num_gpu_layers, options.kv_unified]
    kind.append(library.version())
    key = hashlib.sha256(json.dumps(kind).encode()).digest()
    return KVFiles(Path(options.kv_folder), key, options.kv_disk_bytes, inbox.put)


def _load(channel: Channel[Event, Command], load: Load) -> Model:
    """Raises LoadFailed, also for what the native library reports in its own way."""
    reported = 0

    def on_progress(fraction: float) -> None:
        nonlocal reported
        percent = int(fraction * 100)
        if percent > reported:
            reported = percent
            channel.send(messages.LoadProgress(fraction))

    try:
        return Model(load.model_path, load.options, on_progress)
    except LocalLLMError:
        raise
    except Exception as error:
        _log.exception("loading failed")
        raise LoadFailed(f"the model could not be loaded: {error}") from error


def _start_reader(channel: Channel[Event, Command], queues: _Queues, takers: _Takers) -> None:
    threading.Thread(target=_prepare, args=(channel, queues, takers), name="reader", daemon=True).start()


def _prepare(channel: Channel[Event, Command], queues: _Queues, takers: _Takers) -> None:
    """The reader thread: templates and tokenising stay off the engine's thread, and a bad request fails alone."""
    while True:
        command = queues.requests.get()
        if isinstance(command, Cancel):
            takers.cancel(command.id)
            continue
        if isinstance(command, SetThreads):
            takers.set_threads(command.num_threads)
            continue
        try:
            if isinstance(command, Embed):
                takers.embed(command.request)
            else:
                takers.chat(command.request)
        except LocalLLMError as error:
            channel.send(messages.Outputs([messages.Failed(command.request.id, error.info())]))
        except Exception as error:
            _log.exception("request %s could not be prepared", command.request.id)
            failure = RunnerCrashed(f"the request could not be prepared: {error}")
            channel.send(messages.Outputs([messages.Failed(command.request.id, failure.info())]))


def _info(model: Model, options: LoadOptions, *, num_slots: int, num_ctx: int) -> RunnerInfo:
    layers_on_gpu = 0
    if library.supports_gpu():
        wanted = options.num_gpu_layers
        layers_on_gpu = model.num_layers if wanted < 0 else min(wanted, model.num_layers)
    return RunnerInfo(
        num_slots=num_slots,
        num_ctx=num_ctx,
        num_ctx_train=model.num_ctx_train,
        num_threads=options.num_threads,
        num_threads_batch=options.num_threads_batch,
        num_gpu_layers=layers_on_gpu,
        num_layers=model.num_layers,
        size_bytes=model.size_bytes,
        size_vram_bytes=model.size_bytes * layers_on_gpu // max(1, model.num_layers),
        system_info=library.system_info(),
    )
