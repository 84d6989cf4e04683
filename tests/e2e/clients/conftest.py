"""One real daemon with the real chat model, for clients that nobody has changed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.conftest import Machine

MODEL = "smollm2"


@dataclass(frozen=True)
class Served:
    url: str
    machine: Machine


@pytest.fixture(scope="package")
def served(chat_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "OLLAMA_"))} | {
        "LOCALLLM_HOST": address,
        "LOCALLLM_MODELS": str(chat_store),
        "LOCALLLM_NUM_PARALLEL": "2",
        "LOCALLLM_CONTEXT_LENGTH": "1024",
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    machine = Machine(address, env)
    daemon = machine.serve()
    yield Served(machine.url, machine)
    daemon.terminate()
    daemon.wait(20)
