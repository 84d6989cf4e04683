"""A daemon of the test's own, started and spoken to as a user would."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.fixtures.cli import end_all


@dataclass
class Machine:
    """Settings for one address, and the command line under them."""

    address: str
    env: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def cli(self, *arguments: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "localllm", *arguments],
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def serve(self) -> subprocess.Popen[bytes]:
        """A daemon in the foreground, ready to answer."""
        process = subprocess.Popen([sys.executable, "-m", "localllm", "serve"], env=self.env, stderr=subprocess.DEVNULL)
        self.daemons.append(process)
        until(lambda: self.pid() is not None)
        return process

    def pid(self) -> int | None:
        """The daemon's process id; None while none answers."""
        with contextlib.suppress(httpx.TransportError):
            return int(httpx.get(f"{self.url}/health").json()["pid"])
        return None

    def ps(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = httpx.get(f"{self.url}/api/ps").json()["models"]
        return models

    def runners(self) -> list[psutil.Process]:
        pid = self.pid()
        return [] if pid is None else psutil.Process(pid).children()


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def machine(chat_store: Path, tmp_path: Path) -> Iterator[Machine]:
    """A free address, an own state folder, and the store with the chat model. Whatever is left is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = os.environ | {
        "LOCALLLM_HOST": address,
        "LOCALLLM_MODELS": str(chat_store),
        "LOCALLLM_NUM_PARALLEL": "4",
        "LOCALLLM_CONTEXT_LENGTH": "1024",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    machine = Machine(address, env)
    yield machine
    end_all(env)
    for daemon in machine.daemons:
        daemon.wait(10)
