"""Which stored model a request means."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone

from localllm.api.access import check_model
from localllm.errors import InvalidName, InvalidRequest, ModelNotFound
from localllm.store.library import ModelStore, StoredModel

_MAX_FOUND = 256


class ModelFinder:
    """Names to models. What has been found once costs one `stat` from then on, without a change of threads."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._found: dict[str, StoredModel] = {}

    async def find(self, name: str) -> StoredModel:
        """Raises InvalidRequest or ModelNotFound in Ollama's words, Forbidden, InvalidModelFile or StoreError."""
        model = await self._find(name)
        check_model(model)
        return model

    async def _find(self, name: str) -> StoredModel:
        model = self._found.get(name)
        if model is not None and self._is_current(model):
            return model
        try:
            model = await asyncio.to_thread(self._resolve, name)
        except InvalidName as error:
            raise InvalidRequest("invalid model name", hint=error.hint or error.message, field="model") from None
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{name}' not found", hint=error.hint, field="model") from None
        if len(self._found) >= _MAX_FOUND:
            self._found.clear()
        self._found[name] = model
        return model

    def _is_current(self, model: StoredModel) -> bool:
        try:
            seconds = self._store.manifests.path(model.name).stat().st_mtime
        except OSError:
            return False
        return datetime.fromtimestamp(seconds, timezone.utc) == model.modified_at

    def _resolve(self, name: str) -> StoredModel:
        model = self._store.resolve(name)
        # Reads the file's header on first use, which does not belong on the event loop.
        _ = model.capabilities
        return model
