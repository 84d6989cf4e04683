"""A GGUF file behind an http or https address."""

from __future__ import annotations

import httpx

from localllm.store.manifests import MODEL_LAYER
from localllm.store.sources import Plan, PlannedFile
from localllm.store.transfer import Remote


class UrlSource:
    def __init__(self, url: str, *, sha256: str = "", size: int | None = None) -> None:
        self.label = httpx.URL(url).host
        self._remote = Remote(url, sha256=sha256, size=size)

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        return Plan((PlannedFile(MODEL_LAYER, self._remote),))
