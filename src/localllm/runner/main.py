"""A runner process: load one model, then answer requests until the daemon closes the channel.

Three threads work: the main one loads and then is the engine, the reader prepares requests, the output thread writes
deltas. A fourth watches the channel, whose end ends the process at once, whatever is being computed: that is how
unloading, cancelling a load and the daemon's death all work, and why nothing here needs to be freed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

from localllm import log
from localllm.errors import LoadFailed, LocalLLMError, RunnerCrashed
from localllm.llama import library
from localllm.llama.context import Context
from localllm.llama.model import Model
from localllm.protocol import messages
from localllm.protocol.channel import Channel
from localllm.protocol.messages import Cancel, Chat, Command, Event, Load
from localllm.runner.cost import StepCost
from localllm.runner.engine import Departure, Engine
from localllm.runner.output import OutputThread
from localllm.runner.prepare import Preparer
from localllm.runner.scheduler import Scheduler
from localllm.types import LoadOptions, RunnerInfo

_log = logging.getLogger(__name__)

# The engine must get the interpreter back quickly after each native call; the default of 5 ms is a whole step.
_SWITCH_INTERVAL_SECONDS = 0.0002

Requests = queue.SimpleQueue[Chat | Cancel]


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
    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, requests), name="channel", daemon=True).start()
    try:
        _serve(channel, load, requests)
    except Exception:
        _log.exception("the engine stopped")
        _leave(1)


def _read(channel: Channel[Event, Command], requests: Requests) -> None:
    """Pass requests on until the daemon hangs up, then end the process."""
    with contextlib.suppress(Exception):
        while (command := channel.receive()) is not None:
            assert not isinstance(command, Load), "a runner loads once"
            requests.put(command)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End without clean-up: native threads may be in the middle of a step, and the system reclaims everything."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)


def _serve(channel: Channel[Event, Command], load: Load, requests: Requests) -> None:
    try:
        model, context = _load(channel, load)
        preparer = Preparer(model, context.num_ctx, load.chat_template or model.chat_template)
    except LocalLLMError as error:
        channel.send(messages.LoadFailed(error.info()))
        _leave(1)
    options = load.options
    scheduler = Scheduler(
        num_slots=context.num_slots,
        max_batch_tokens=context.batch.capacity,
        cost=StepCost(options.target_itl_ms / 1000),
        can_cut=context.can_cut,
    )
    output = OutputThread(channel.send, lambda id: engine.inbox.put(Departure(id)))
    engine = Engine(context, scheduler, output.report)
    output.start()
    threading.Thread(
        target=_prepare, args=(channel, requests, preparer, engine, output), name="reader", daemon=True
    ).start()
    channel.send(messages.Loaded(_info(model, context, options)))
    engine.run()


def _load(channel: Channel[Event, Command], load: Load) -> tuple[Model, Context]:
    """Raises LoadFailed, also for what the native library reports in its own way."""
    reported = 0

    def on_progress(fraction: float) -> None:
        nonlocal reported
        percent = int(fraction * 100)
        if percent > reported:
            reported = percent
            channel.send(messages.LoadProgress(fraction))

    try:
        model = Model(load.model_path, load.options, on_progress)
        return model, Context(model, load.options)
    except LocalLLMError:
        raise
    except Exception as error:
        _log.exception("loading failed")
        raise LoadFailed(f"the model could not be loaded: {error}") from error


def _prepare(
    channel: Channel[Event, Command], requests: Requests, preparer: Preparer, engine: Engine, output: OutputThread
) -> None:
    """The reader thread: templates and tokenising stay off the engine's thread, and a bad request fails alone."""
    while True:
        command = requests.get()
        if isinstance(command, Cancel):
            engine.inbox.put(Departure(command.id))
            continue
        try:
            live, arrival = preparer.prepare(command.request)
        except LocalLLMError as error:
            channel.send(messages.Outputs([messages.Failed(command.request.id, error.info())]))
        except Exception as error:
            _log.exception("request %s could not be prepared", command.request.id)
            failure = RunnerCrashed(f"the request could not be prepared: {error}")
            channel.send(messages.Outputs([messages.Failed(command.request.id, failure.info())]))
        else:
            output.register(live)
            engine.inbox.put(arrival)


def _info(model: Model, context: Context, options: LoadOptions) -> RunnerInfo:
    layers_on_gpu = 0
    if library.supports_gpu():
        wanted = options.num_gpu_layers
        layers_on_gpu = model.num_layers if wanted < 0 else min(wanted, model.num_layers)
    return RunnerInfo(
        num_slots=context.num_slots,
        num_ctx=context.num_ctx,
        num_ctx_train=model.num_ctx_train,
        num_threads=options.num_threads,
        num_threads_batch=options.num_threads_batch,
        num_gpu_layers=layers_on_gpu,
        num_layers=model.num_layers,
        size_bytes=model.size_bytes,
        size_vram_bytes=model.size_bytes * layers_on_gpu // max(1, model.num_layers),
        system_info=library.system_info(),
    )
