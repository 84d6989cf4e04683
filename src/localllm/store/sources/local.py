"""A GGUF file on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from localllm.errors import NotFoundAtSource
from localllm.store.gguf import read_header
from localllm.store.manifests import MODEL_LAYER
from localllm.store.sources import LocalFile, Plan, PlannedFile, refuse_split


class LocalSource:
    def __init__(self, path: Path) -> None:
        self.label = self.place = str(path)
        self._path = path

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        """Raises NotFoundAtSource, Unsupported, or InvalidModelFile before anything is hashed or linked."""
        if not self._path.is_file():
            raise NotFoundAtSource(f"{self._path} is not a file", hint="Name a GGUF file.")
        refuse_split(self._path.name)
        await asyncio.to_thread(read_header, self._path)
        return Plan((PlannedFile(MODEL_LAYER, LocalFile(self._path)),))
