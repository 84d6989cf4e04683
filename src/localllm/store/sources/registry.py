"""Registries that speak Ollama's dialect of the Docker registry protocol, version 2."""

from __future__ import annotations

import re

import httpx

from localllm.errors import LocalLLMError, NotFoundAtSource, SourceUnavailable, StoreError, Unauthorized, Unsupported
from localllm.store.manifests import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    MODEL_LAYER,
    Layer,
    Manifest,
    parse_manifest,
)
from localllm.store.names import ModelName
from localllm.store.sources import Plan, PlannedFile
from localllm.store.web import Remote, Retry, is_passing, open_url, retry_after, retrying

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistrySource:
    def __init__(self, name: ModelName, *, insecure: bool = False) -> None:
        """`insecure` means plain http, as in Ollama."""
        self.label = self.place = f"the registry {name.host}"
        self._name = name
        self._base = f"{'http' if insecure else 'https'}://{name.host}/v2/{name.namespace}/{name.model}"

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        headers: dict[str, str] = {}
        data, challenge = await self._get_manifest(client, headers)
        if challenge:
            headers = await self._authorize(client, challenge)
            data, challenge = await self._get_manifest(client, headers)
        if challenge:
            raise self._refused("it does not let you read this model")
        manifest = self._parse(data)
        return Plan(tuple(self._planned(layer, headers) for layer in manifest.parts), data)

    def _parse(self, data: bytes) -> Manifest:
        try:
            manifest = parse_manifest(data)
        except StoreError as error:
            raise SourceUnavailable(f"{self.label} sent something else: {error.message}") from None
        if len(manifest.of_type(MODEL_LAYER)) != 1:
            raise Unsupported(
                f"{self._name.display} is not one GGUF file with its settings", hint="Choose another tag or model."
            )
        return manifest

    def _planned(self, layer: Layer, headers: dict[str, str]) -> PlannedFile:
        url = f"{self._base}/blobs/sha256:{layer.hex}"
        return PlannedFile(layer.media_type, Remote(url, headers, layer.hex, layer.size, self._authorize))

    async def _get_manifest(self, client: httpx.AsyncClient, headers: dict[str, str]) -> tuple[bytes, str]:
        """The manifest's bytes, or the challenge of a 401."""
        url = f"{self._base}/manifests/{self._name.tag}"

        async def get() -> tuple[bytes, str]:
            async with open_url(client, url, {"Accept": MANIFEST_TYPE, **headers}) as response:
                if response.status_code == 401:
                    return b"", response.headers.get("WWW-Authenticate", "none")
                if response.status_code != 200:
                    raise self._error_of(response)
                return await self._read(response), ""

        return await retrying(get, self.label)

    def _error_of(self, response: httpx.Response) -> LocalLLMError | Retry:
        code = response.status_code
        if code == 404:
            return NotFoundAtSource(f"{self.label} has no model {self._name.display}")
        text = f"{self.label} answered {code} for the manifest"
        return Retry(text, retry_after(response.headers)) if is_passing(code) else SourceUnavailable(text)

    async def _read(self, response: httpx.Response) -> bytes:
        data = b""
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_MANIFEST_BYTES:
                raise SourceUnavailable(f"{self.label} sent an absurdly large manifest")
        return data

    async def _authorize(self, client: httpx.AsyncClient, challenge: str) -> dict[str, str]:
        """Headers with an anonymous bearer token. The realm must be on the registry's own host: anybody could collect
        secrets otherwise.
        """
        fields = dict(_CHALLENGE.findall(challenge))
        home = httpx.URL(self._base)
        try:
            realm = httpx.URL(fields.get("realm", ""))
        except httpx.InvalidURL:
            raise self._refused("it asks for credentials at something that is no address") from None
        if (realm.scheme, realm.host) != (home.scheme, home.host):
            raise self._refused(f"it wants credentials for another host, {realm.host or 'unnamed'}")
        parameters = {key: fields[key] for key in ("service", "scope") if key in fields}
        try:
            response = await client.get(realm, params=parameters)
            answer = response.json()
            return {"Authorization": f"Bearer {answer.get('token') or answer['access_token']}"}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            raise self._refused("it gives no token to somebody unknown") from None

    def _refused(self, reason: str) -> Unauthorized:
        return Unauthorized(f"unauthorized: {self.label} denies access: {reason}")
