"""What all tests share: the real chat model, and protection from the settings of whoever runs them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from localllm.store.library import ModelStore

CACHE = Path(__file__).parents[1] / ".test-cache"


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the user's settings, store, state or configuration, nor a running daemon of theirs."""
    for name in list(os.environ):
        if name.startswith(("LOCALLLM_", "OLLAMA_")):
            monkeypatch.delenv(name)
    for kind in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path_factory.getbasetemp() / f"xdg-{kind.lower()}"))


@pytest.fixture(scope="session")
def chat_store() -> Path:
    """A store with SmolLM2-135M-Instruct, pulled once per checkout from whichever of its sources answers."""
    store = ModelStore(CACHE / "models")
    if not any(model.name.display == "smollm2:latest" for model in store.list()):

        async def pull() -> None:
            async for _ in store.pull("smollm2"):
                pass

        asyncio.run(pull())
    return store.root


@pytest.fixture(scope="session")
def chat_model(chat_store: Path) -> Path:
    return ModelStore(chat_store).resolve("smollm2").model_path


@pytest.fixture(scope="session")
def embedding_model() -> Path:
    """all-MiniLM-L6-v2, converted to GGUF; the test is skipped where nobody has put the file."""
    name = "all-minilm-l6-v2-F16.gguf"
    for folder in (CACHE, CACHE.parents[1] / "shared" / "models"):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"there is no {name} in {CACHE}")
