"""The command line's view of a daemon: requests in, dictionaries or typed errors out."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx

import localllm
from localllm.config import Address, log_file, parse_address
from localllm.errors import ConfigError, DaemonUnavailable, ErrorInfo, LocalLLMError, ModelNotFound, from_info

CONNECT_SECONDS = 5.0
_EXCERPT = 200


class Client:
    """Speaks the native API of the daemon at `host`. Reading waits for ever: a load or a prompt may take minutes."""

    def __init__(self, host: Address, *, api_key: str = "", certificate: Path | None = None) -> None:
        """`certificate` is trusted beside those that the system trusts.

        Raises ConfigError for an address that nobody can connect to, or a certificate that nobody can read.
        """
        self.url = host.url
        # An unspecified address is one to listen on; the URL has the loopback address through which it is reached.
        self.is_local = parse_address(host.url).is_loopback
        self.http = _connection(self.url, host.scheme, api_key, certificate, is_local=self.is_local)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    @property
    def log_hint(self) -> str:
        return f"Its log is {log_file()}." if self.is_local else "Look at its log, on its machine."

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request and its JSON answer. Raises the error that the daemon names, or DaemonUnavailable."""
        with self._reaching():
            response = self.http.request(method, path, json=body)
        if response.is_error:
            raise _error_of(response)
        return _parse(response.content) if response.content else {}

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The objects of an NDJSON answer as they come; closing it hangs up, which cancels what the daemon does.

        Raises what `call` raises, also for an error object inside the stream.
        """
        with self._reaching(), self.http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _error_of(response)
            for line in _lines(response.iter_bytes()):
                event = _parse(line)
                if "error" in event:
                    raise _error_from(event)
                yield event

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"{self.url} is not an address to connect to: {error}", hint="Set LOCALLLM_HOST."
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self.unreachable(error) from None
        except httpx.TransportError as error:
            raise DaemonUnavailable(
                f"the daemon went away: {str(error) or type(error).__name__}", hint=self.log_hint
            ) from None

    def unreachable(self, error: httpx.TransportError) -> DaemonUnavailable:
        """What to raise when nobody can be talked to."""
        reason = str(error).partition("] ")[2] or str(error) or "no answer"
        return DaemonUnavailable(
            f"could not connect to a daemon at {self.url}: {reason}",
            hint="Start it with `localllm serve`, or set LOCALLLM_HOST to where it runs.",
        )


def _connection(url: str, scheme: str, api_key: str, certificate: Path | None, *, is_local: bool) -> httpx.Client:
    if scheme not in ("http", "https"):
        raise ConfigError(f"{url} is not an address to connect to", hint="Set LOCALLLM_HOST to http:// or https://.")
    try:
        return httpx.Client(
            base_url=url,
            headers={"User-Agent": f"localllm/{localllm.__version__}", **_authorization(api_key)},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            # A proxy for the outside has no business between two processes of one machine.
            trust_env=not is_local,
            # Reading the certificates takes 0.1 s, which plain HTTP does not need.
            verify=_trust(certificate) if scheme == "https" else False,
        )
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is not an address to connect to: {error}", hint="Set LOCALLLM_HOST.") from None


def _authorization(api_key: str) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key has characters that no key has", hint="Check LOCALLLM_API_KEY.")
    return {"Authorization": f"Bearer {api_key}"}


def _trust(certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if certificate is not None:
        try:
            context.load_verify_locations(certificate)
        except OSError as error:
            raise ConfigError(
                f"the certificate {certificate} cannot be read: {error}", hint="Check LOCALLLM_TLS_CERTIFICATE."
            ) from None
    return context


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split at newlines and nothing else: JSON text may hold the other characters that end lines in Unicode."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(bytes.strip, lines)
    if rest.strip():
        yield rest


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        text = data[:_EXCERPT].decode("utf-8", "replace")
        raise LocalLLMError(f"the daemon's answer makes no sense: {text}", hint="Is there a proxy in between?")
    return value


def _error_of(response: httpx.Response) -> LocalLLMError:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or "error" not in body:
        text = f"the daemon answered {response.status_code} to {response.request.method} {response.request.url.path}"
        return LocalLLMError(text, hint="Is it of the same version as this command?")
    return _error_from(body, response.status_code)


def _error_from(body: dict[str, Any], status: int = 500) -> LocalLLMError:
    message, code, hint = (str(body.get(key) or "") for key in ("error", "code", "hint"))
    if not code and status == 404:
        return ModelNotFound(message, hint=hint)
    return from_info(ErrorInfo(code, message, hint))
