"""The daemon's entry: compose store, supervisor and API, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Generator, Sequence

import uvicorn
import uvloop

from localllm import __version__, log
from localllm.config import Config, keys_file
from localllm.daemon.exposure import check_certificate, check_openness
from localllm.daemon.instance import BACKLOG, claim
from localllm.daemon.runner_process import RUNNER_COMMAND
from localllm.daemon.supervisor import Supervisor
from localllm.keys.accounts import Accounts
from localllm.store.library import ModelStore

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What is not inference (a pull, say) gets this long to end after the draining; a cut pull can be resumed.
FLUSH_SECONDS = 2
# Clients keep idle connections in pools; closing them early makes their next request fail.
KEEP_ALIVE_SECONDS = 75
# The second is all that macOS grants, whatever it says the limit is.
NUM_DESCRIPTORS = (65536, 10240)

_log = logging.getLogger(__name__)


def serve(config: Config, *, runner_command: Sequence[str] = RUNNER_COMMAND) -> int:
    """Run the daemon in this process until SIGTERM or SIGINT. Returns the exit status: 0, or 1 after a forced stop.

    The first signal drains (new work is refused, running requests get `config.drain_timeout` seconds), the second
    ends everything at once. Raises AddressInUse or ConfigError.
    """
    log.setup(debug=config.debug)
    _raise_descriptor_limit()
    accounts = Accounts(keys_file(), is_key_needed=not (config.host.is_loopback or config.allow_no_key))
    check_openness(config, accounts)
    check_certificate(config)
    with claim(config) as sock:
        return uvloop.run(_serve(config, sock, accounts, runner_command))


async def _serve(config: Config, sock: socket.socket, accounts: Accounts, runner_command: Sequence[str]) -> int:
    # The API imports the daemon's interface; only here does the daemon import the API.
    from localllm.api.app import create_app

    store = ModelStore(config.models)
    supervisor = Supervisor(config, command=runner_command)
    await supervisor.start()
    server = _Server(_uvicorn_config(config, create_app(config, store, supervisor, accounts)))
    shutdown = _Shutdown(server, supervisor, config.drain_timeout)
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, shutdown.on_signal)
    _announce(config)
    try:
        await server.serve(sockets=[sock])
        await _say_goodbye(server)
    finally:
        await supervisor.drain(0)
        await accounts.flush()
    _log.info("stopped")
    return 1 if shutdown.is_forced else 0


async def _say_goodbye(server: uvicorn.Server) -> None:
    """Let requests that uvicorn has just cancelled tell their clients so."""
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=FLUSH_SECONDS)


def _announce(config: Config) -> None:
    _log.info(
        "localllm %s listens on %s (pid %d), models in %s", __version__, config.host.url, os.getpid(), config.models
    )
    if not config.host.is_loopback and config.allow_no_key:
        _log.warning("%s is open to other machines: without keys, whoever reaches it can use it", config.host.host)


def _uvicorn_config(config: Config, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="uvloop",
        http="httptools",
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
    )


class _Server(uvicorn.Server):
    """Uvicorn without its signal handling, which would raise the signal again at the end instead of exiting with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Shutdown:
    """What the stop signals do. The listener stays open while draining, so that clients are told instead of cut off."""

    def __init__(self, server: uvicorn.Server, supervisor: Supervisor, drain_timeout: float | None) -> None:
        self._server = server
        self._supervisor = supervisor
        self._drain_timeout = drain_timeout
        self._tasks: list[asyncio.Task[None]] = []
        self.is_forced = False

    def on_signal(self) -> None:
        if not self._tasks:
            _log.info("stopping: running requests may finish; a second signal stops at once")
            self._tasks.append(asyncio.create_task(self._drain(self._drain_timeout)))
        elif not self.is_forced:
            _log.warning("stopping at once")
            self.is_forced = True
            self._server.force_exit = True
            self._tasks.append(asyncio.create_task(self._drain(0)))

    async def _drain(self, timeout: float | None) -> None:
        await self._supervisor.drain(timeout)
        self._server.should_exit = True


def _raise_descriptor_limit() -> None:
    """Each client takes a descriptor, and some systems start with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in NUM_DESCRIPTORS:
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
