"""The outermost layer: who may call, under which names and with which key, and what every answer carries.

A web page may reach a daemon on this machine: directly, which the browser announces with an Origin, or through a host
name that it made point here (DNS rebinding), which the Host header gives away. Both are refused unless the settings
allow them. Programs send neither and are not concerned.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable

import psutil
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm import log
from localllm.api import access
from localllm.api.errors import error_response, internal_error
from localllm.config import Config
from localllm.errors import Forbidden, LocalLLMError
from localllm.keys.accounts import Accounts

_log = logging.getLogger(__name__)

# Ollama's list: pages served from this machine, and applications that are web pages in disguise.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
DEFAULT_ORIGINS = (
    *(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in _LOCAL_HOSTS for port in ("", ":*")),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
_HEADERS = "Authorization, X-Api-Key, Content-Type, User-Agent, Accept, X-Requested-With, X-Request-Id"
_EXPOSED = "X-Request-Id, Retry-After"
_PREFLIGHT_SECONDS = 12 * 3600
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Policy:
    """Which hosts and origins may be used. Pure: all that it needs to know is given to it."""

    def __init__(self, origins: Iterable[str], own_names: Iterable[str] = ()) -> None:
        """`origins` may hold one `*` each, `*` alone is everybody; `own_names` are this machine's."""
        self._configured = _any_of(origins)
        self._default = _any_of(DEFAULT_ORIGINS)
        self._own_names = {name.lower() for name in own_names}

    def allows_host(self, header: str) -> bool:
        """Whether a request to a loopback address may name its target like that."""
        host = _without_port(header).lower().rstrip(".")
        if host in ("", "localhost") or host in self._own_names or host.endswith(_LOCAL_SUFFIXES):
            return True
        if any(self._configured.fullmatch(origin) for origin in _origins_of(header)):
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or address.is_private or address.is_unspecified

    def allows_origin(self, origin: str, host: str) -> bool:
        """A page that this server itself has served is no stranger."""
        is_known = self._default.fullmatch(origin) or self._configured.fullmatch(origin)
        return is_known is not None or origin in _origins_of(host)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches what any of `patterns` does, in which a `*` stands for anything; without patterns, nothing."""
    choices = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    return re.compile("|".join(choices) or r"(?!)", re.IGNORECASE)


def _origins_of(host: str) -> tuple[str, str]:
    """The origins of pages that come from `host`."""
    return f"http://{host}", f"https://{host}"


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host)


def own_names() -> set[str]:
    """The host name of this machine and the addresses of its interfaces."""
    addresses = {a.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for a in interface}
    return {socket.gethostname(), *addresses}


class Guard:
    """ASGI middleware: request id, host check, CORS, API keys, and the last answer to what nobody caught."""

    def __init__(self, app: ASGIApp, config: Config, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts
        self._policy = Policy(config.origins, own_names())
        self._checks_host = config.host.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        log.request_id.set(request_id)
        origin, host = headers.get("origin", ""), headers.get("host", "")
        extra = [(b"x-request-id", request_id.encode())]
        answer = self._refusal(scope["path"], host, origin)
        if answer is None and origin:
            extra += _cors_headers(origin)
            answer = _preflight(headers) if scope["method"] == "OPTIONS" else None
        answer = answer or self._check_key(scope, headers)
        await self._serve(answer or self._app, scope, receive, _Sender(send, extra))

    def _refusal(self, path: str, host: str, origin: str) -> Response | None:
        if self._checks_host and not self._policy.allows_host(host):
            return error_response(path, _forbidden("host", host, f"http://{host}"))
        if origin and not self._policy.allows_origin(origin, host):
            return error_response(path, _forbidden("origin", origin, origin))
        return None

    def _check_key(self, scope: Scope, headers: Headers) -> Response | None:
        try:
            access.admit(self._accounts, scope["method"], scope["path"], headers)
        except LocalLLMError as error:
            return error_response(scope["path"], error)
        return None

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: _Sender) -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if send.is_started:
                raise
            await error_response(scope["path"], internal_error())(scope, receive, send)


class _Sender:
    """`send` that adds headers to the start of the response."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The client's own, if it is one that a log can hold."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else log.new_request_id()


def _forbidden(what: str, value: str, origin: str) -> Forbidden:
    return Forbidden(
        f'{what} "{value}" is not allowed',
        hint=f"Start the daemon with LOCALLLM_ORIGINS={origin} to allow it.",
        field=what,
    )


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED.encode()),
        (b"vary", b"Origin"),
    ]


def _preflight(headers: Headers) -> Response:
    """An allowed origin may send what it likes."""
    allowed = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", _HEADERS),
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)
