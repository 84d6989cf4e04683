"""Finding the daemon, and starting one in the background where none runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

import localllm
from localllm.cli import output
from localllm.cli.client import Client
from localllm.cli.status import Status
from localllm.config import CONFIG_ENV, Config, config_file, log_file
from localllm.errors import AddressInUse, DaemonUnavailable

DAEMON_COMMAND = (sys.executable, "-m", "localllm", "serve")
START_SECONDS = 30.0
# A daemon listens before it has loaded what it answers with.
PROBE_SECONDS = 10.0
# A log that has grown beyond this is put aside, replacing the one before, when the next daemon starts.
MAX_LOG_BYTES = 16_000_000
_LOOK_SECONDS = 0.05
# For a daemon that found the address taken by one that did not answer yet, or no more.
_AGAIN_SECONDS = 1.0
_NUM_LAST_LINES = 3


def client_for(config: Config) -> Client:
    """A client of the daemon at `config.host`, whether there is one or not."""
    return Client(config.host, api_key=config.api_key, certificate=config.tls_certificate)


def connect(config: Config, *, start: bool = True) -> Client:
    """A client of the daemon at `config.host`, which is started first if it may and must be.

    Raises AddressInUse when something else answers there, DaemonUnavailable when nothing does.
    """
    client = client_for(config)
    try:
        ensure_running(client, config, start=start)
    except BaseException:
        client.http.close()
        raise
    return client


def ensure_running(
    client: Client, config: Config, *, start: bool = True, command: Sequence[str] = DAEMON_COMMAND
) -> None:
    """What `connect` does, for a client that is there already."""
    try:
        version = find_daemon(client)
    except httpx.ConnectError as error:
        # The daemon speaks at the root, and HTTPS only with a certificate: otherwise, a proxy is meant.
        scheme = "http" if config.tls_certificate is None else "https"
        if not (start and client.is_local and config.host.scheme == scheme and not config.host.path):
            raise client.unreachable(error) from None
        with output.waiting("starting the daemon"):
            _start(client, config, command)
        return
    if version != localllm.__version__:
        output.notice(f"Warning: the daemon is version {version}, this is {localllm.__version__}: restart the daemon")


def find_daemon(client: Client) -> str:
    """The version of the daemon that answers.

    Raises httpx.ConnectError when nobody listens, DaemonUnavailable when nobody answers in time, and AddressInUse
    when it is not a daemon of ours.
    """
    try:
        health = client.http.get("/health", timeout=PROBE_SECONDS)
        if version := _version_in(health):
            return version
        is_ollama = "Ollama is running" in client.http.get("/", timeout=PROBE_SECONDS).text
    except httpx.ConnectError:
        raise
    except httpx.ConnectTimeout as error:
        raise client.unreachable(error) from None
    except httpx.TimeoutException:
        raise DaemonUnavailable(
            f"{client.url} accepts connections but did not answer within {PROBE_SECONDS:g} s", hint=client.log_hint
        ) from None
    except httpx.TransportError:
        is_ollama = False
    raise AddressInUse(
        f"a different server{' (Ollama)' if is_ollama else ''} answers at {client.url}",
        hint="Stop it, or set LOCALLLM_HOST to another port, for example LOCALLLM_HOST=127.0.0.1:11500.",
    )


def _version_in(health: httpx.Response) -> str:
    """Empty unless the answer is one of ours."""
    try:
        body = health.json()
    except ValueError:
        return ""
    is_ours = isinstance(body, dict) and body.get("server") == "localllm"
    return str(body.get("version") or "unknown") if is_ours else ""


def _start(client: Client, config: Config, command: Sequence[str]) -> None:
    """Start a daemon that outlives this process, and wait until one answers: ours, or that of a quicker neighbour."""
    deadline = time.monotonic() + START_SECONDS
    child, log, began = _spawn(config, command)
    while time.monotonic() < deadline:
        status = child.poll()
        try:
            find_daemon(client)
            return
        except AddressInUse:
            # Or one that ended while it was asked: then its own words are better.
            if status == Status.ADDRESS_IN_USE:
                raise
        except (httpx.ConnectError, DaemonUnavailable):
            pass
        if status is None:
            time.sleep(_LOOK_SECONDS)
        elif status == Status.ADDRESS_IN_USE:
            time.sleep(_AGAIN_SECONDS)
            child, log, began = _spawn(config, command)
        else:
            raise _failure(log, began)
    child.terminate()
    raise DaemonUnavailable(f"the daemon did not answer within {START_SECONDS:g} s", hint=f"Its log is {log}.")


def _spawn(config: Config, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path, int]:
    """The process, the log that it appends to, and where in it the process begins."""
    log = log_file()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
        with log.open("ab") as stream:
            began = stream.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd="/",
                env={**os.environ, **_absolute_paths(config)},
                start_new_session=True,
            )
        return child, log, began
    except OSError as error:
        raise DaemonUnavailable(
            f"the daemon could not be started: {error}", hint="Start it with `localllm serve`."
        ) from None


def _absolute_paths(config: Config) -> dict[str, str]:
    """Settings of the daemon's environment: what is relative here is not there."""
    paths: dict[str, Path | None] = {
        "LOCALLLM_MODELS": config.models,
        "LOCALLLM_TLS_CERTIFICATE": config.tls_certificate,
        "LOCALLLM_TLS_KEY": config.tls_key,
        CONFIG_ENV: config_file() if CONFIG_ENV in os.environ else None,
    }
    return {name: str(path.absolute()) for name, path in paths.items() if path is not None}


def _failure(log: Path, began: int) -> DaemonUnavailable:
    """What a daemon that has ended says about it: its error and hint, or the last that it wrote."""
    with log.open("rb") as stream:
        stream.seek(began)
        lines = [line.strip() for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    reason = errors[-1] if errors else " / ".join(lines[-_NUM_LAST_LINES:]) or "it said nothing"
    return DaemonUnavailable(
        f"the daemon could not start: {reason}", hint=hints[-1] if errors and hints else f"Its log is {log}."
    )
