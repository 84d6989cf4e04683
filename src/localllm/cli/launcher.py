"""Finding the daemon, and starting one in the background where none runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

import localllm
from localllm.cli import output
from localllm.cli.client import Client
from localllm.config import Config, log_file
from localllm.errors import AddressInUse, DaemonUnavailable

START_SECONDS = 30.0
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 0.05


def connect(config: Config, *, start: bool = True) -> Client:
    """A client of the daemon at `config.host`, which is started first if it may and must be.

    Raises AddressInUse when something else answers there, DaemonUnavailable when nothing does.
    """
    if not _is_running(config):
        if not start or not config.host.is_loopback:
            raise DaemonUnavailable(
                f"could not connect to a daemon at {config.host.url}",
                hint="Start it with `localllm serve`, or set LOCALLLM_HOST to where it runs.",
            )
        _start(config)
    return Client(config)


def _is_running(config: Config) -> bool:
    """True for a daemon of ours, False for silence. Raises AddressInUse for anybody else's server."""
    url = config.host.url
    try:
        with httpx.Client(base_url=url, timeout=_PROBE_SECONDS, trust_env=not config.host.is_loopback) as client:
            response = client.get("/health")
            health = response.json() if "json" in response.headers.get("content-type", "") else {}
            if isinstance(health, dict) and health.get("server") == "localllm":
                _warn_of_version(str(health.get("version")))
                return True
            is_ollama = "Ollama is running" in client.get("/").text
    except httpx.ConnectError:
        return False
    except (httpx.HTTPError, ValueError):
        is_ollama = False
    raise AddressInUse(
        f"{'an Ollama server' if is_ollama else 'another program'} answers at {url}",
        hint="Stop it, or give localllm another address: LOCALLLM_HOST=127.0.0.1:11500",
    )


def _warn_of_version(version: str) -> None:
    if version != localllm.__version__:
        output.notice(f"Warning: the daemon is version {version}, this is {localllm.__version__}; restart the daemon")


def _start(config: Config) -> None:
    """Start a daemon that outlives this process and wait until it answers."""
    with output.waiting("starting the daemon"):
        log = log_file()
        log.parent.mkdir(parents=True, exist_ok=True)
        began = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", "localllm", "serve"],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd="/",
                env={**os.environ, "LOCALLLM_HOST": config.host.url, "LOCALLLM_MODELS": str(config.models.absolute())},
                start_new_session=True,
            )
        _wait(config, child, log, began)


def _wait(config: Config, child: subprocess.Popen[bytes], log: Path, began: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        exited = child.poll() is not None
        # Another command line may have started one at the same moment: whose daemon it is does not matter.
        if _is_running(config):
            return
        if exited:
            raise DaemonUnavailable(f"the daemon could not start: {_last_words(log, began)}", hint=f"Its log is {log}.")
        time.sleep(_RETRY_SECONDS)
    child.terminate()
    raise DaemonUnavailable(f"the daemon did not answer within {START_SECONDS:g} s", hint=f"Its log is {log}.")


def _last_words(log: Path, began: int) -> str:
    with log.open("rb") as stream:
        stream.seek(began)
        lines = [line for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it said nothing"
