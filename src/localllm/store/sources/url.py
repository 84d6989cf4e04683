"""A GGUF file behind an http or https address."""

from __future__ import annotations

import httpx

from localllm.store.manifests import MODEL_LAYER
from localllm.store.sources import Plan, PlannedFile, refuse_split
from localllm.store.web import Remote


class UrlSource:
    def __init__(self, url: str, *, sha256: str = "", size: int | None = None) -> None:
        self.label = self.place = httpx.URL(url).host
        self._remote = Remote(url, sha256=sha256, size=size)

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        """Raises Unsupported for one part of a model in several files."""
        refuse_split(self._remote.file_name)
        return Plan((PlannedFile(MODEL_LAYER, self._remote),))
