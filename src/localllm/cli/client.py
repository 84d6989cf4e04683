"""The command line's view of a daemon: requests in, dictionaries or typed errors out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

from localllm.config import Config, log_file
from localllm.errors import DaemonUnavailable, ErrorInfo, LocalLLMError, ModelNotFound, from_info

CONNECT_SECONDS = 5.0


class Client:
    """Speaks the native API of the daemon at `config.host`."""

    def __init__(self, config: Config) -> None:
        self.url = config.host.url
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        # The daemon is this machine's, or named explicitly: a proxy for the outside has no business in between.
        self._http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=not config.host.is_loopback)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request and its JSON answer. Raises the error that the daemon names, or DaemonUnavailable."""
        with self._reaching():
            response = self._http.request(method, path, json=body)
        if response.is_error:
            raise _error_of(response)
        return response.json() if response.content else {}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of an NDJSON answer as they come. An error object inside is raised like any other error."""
        with self._reaching(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _error_of(response)
            for text in response.iter_lines():
                event = json.loads(text)
                if "error" in event:
                    raise _error_from(event, 500)
                yield event

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise DaemonUnavailable(
                f"could not connect to the daemon at {self.url}", hint="Start it with `localllm serve`."
            ) from None
        except httpx.TransportError as error:
            raise DaemonUnavailable(
                f"the daemon went away: {error or type(error).__name__}", hint=f"Its log is {log_file()}."
            ) from None


def _error_of(response: httpx.Response) -> LocalLLMError:
    try:
        body = response.json()
    except ValueError:
        body = {}
    return _error_from(body if isinstance(body, dict) else {}, response.status_code)


def _error_from(body: dict[str, Any], status: int) -> LocalLLMError:
    message = str(body.get("error") or f"the daemon answered {status}")
    if "code" not in body and status == 404:
        return ModelNotFound(message)
    return from_info(ErrorInfo(str(body.get("code", "")), message, str(body.get("hint", ""))))
