"""Registries that speak Ollama's dialect of the Docker registry protocol, version 2."""

from __future__ import annotations

import re

import httpx

from localllm.errors import NotFoundAtSource, SourceUnavailable, Unauthorized
from localllm.store.manifests import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Layer, parse_manifest
from localllm.store.names import ModelName
from localllm.store.sources import Plan, PlannedFile
from localllm.store.transfer import Remote, open_url

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistrySource:
    def __init__(self, name: ModelName, *, insecure: bool = False) -> None:
        """`insecure` means plain http, as in Ollama."""
        self.label = f"the registry {name.host}"
        self._name = name
        self._base = f"{'http' if insecure else 'https'}://{name.host}/v2/{name.namespace}/{name.model}"

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        headers = {"Accept": MANIFEST_TYPE}
        data, challenge = await self._get_manifest(client, headers)
        if challenge:
            headers["Authorization"] = f"Bearer {await self._token(client, challenge)}"
            data, challenge = await self._get_manifest(client, headers)
            if challenge:
                raise Unauthorized(
                    "unauthorized: access denied", hint=f"{self.label} does not let you read this model."
                )
        manifest = parse_manifest(data)
        layers = [*manifest.layers, *([manifest.config] if manifest.config.digest else [])]
        auth = {k: v for k, v in headers.items() if k == "Authorization"}
        return Plan(tuple(self._planned(layer, auth) for layer in layers), data)

    def _planned(self, layer: Layer, headers: dict[str, str]) -> PlannedFile:
        url = f"{self._base}/blobs/sha256:{layer.hex}"
        return PlannedFile(layer.media_type, Remote(url, headers, layer.hex, layer.size))

    async def _get_manifest(self, client: httpx.AsyncClient, headers: dict[str, str]) -> tuple[bytes, str]:
        """The manifest's bytes, or the challenge of a 401."""
        url = f"{self._base}/manifests/{self._name.tag}"
        try:
            async with open_url(client, url, headers) as response:
                if response.status_code == 401:
                    return b"", response.headers.get("WWW-Authenticate", "none")
                if response.status_code == 404:
                    raise NotFoundAtSource(f"{self.label} has no model {self._name.display}")
                if response.status_code != 200:
                    raise SourceUnavailable(f"{self.label} answered {response.status_code} for the manifest")
                data = b""
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_MANIFEST_BYTES:
                        raise SourceUnavailable(f"{self.label} sent an absurdly large manifest")
                return data, ""
        except httpx.HTTPError as error:
            raise SourceUnavailable(f"{self.label} cannot be reached: {error or type(error).__name__}") from None

    async def _token(self, client: httpx.AsyncClient, challenge: str) -> str:
        """An anonymous bearer token. The realm must be on the registry's own host, or anybody could collect secrets."""
        fields = dict(_CHALLENGE.findall(challenge))
        realm = httpx.URL(fields.get("realm", ""))
        if realm.host != httpx.URL(self._base).host:
            raise Unauthorized(f"{self.label} wants credentials for another host, {realm.host or 'unnamed'}")
        parameters = {key: fields[key] for key in ("service", "scope") if key in fields}
        try:
            response = await client.get(realm, params=parameters)
            return str(response.json()["token"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            raise Unauthorized("unauthorized: access denied", hint=f"{self.label} gave no token.") from None
