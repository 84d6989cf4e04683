"""HTTP as every source speaks it: redirects followed by hand, credentials kept at home, statuses made into errors."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from localllm.errors import Forbidden, NotFoundAtSource, SourceUnavailable, Unauthorized

# To reach a server at all, over all of its addresses. Beyond it the next source is tried.
CONNECT_SECONDS = 8.0
# A connection that gives no byte for this long is dropped and opened again.
STALL_SECONDS = 30.0
# How often to ask again: a server that has given nothing yet may have a substitute, a download under way has none.
FIRST_ATTEMPTS = 4
MAX_ATTEMPTS = 8
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# A server that asks for more patience than this is as good as unreachable.
MAX_RETRY_AFTER_SECONDS = 120.0
MAX_REDIRECTS = 10

T = TypeVar("T")
Authorize = Callable[[httpx.AsyncClient, str], Awaitable[dict[str, str]]]


@dataclass(frozen=True)
class Remote:
    """A file to fetch. `headers` may hold credentials: they go to the origin of `url` and nowhere else.

    `sha256` is bare hex, "" when the source does not say; `size` in bytes, None likewise. `authorize` makes new headers
    from the challenge of a 401, for credentials that run out during a long download.
    """

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    sha256: str = ""
    size: int | None = None
    authorize: Authorize | None = None

    @property
    def file_name(self) -> str:
        return httpx.URL(self.url).path.rsplit("/", 1)[-1] or self.url


class Retry(Exception):
    """Worth another attempt, after `delay` seconds if the server named them."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


def new_client() -> httpx.AsyncClient:
    timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS, pool=None)
    # The bytes that the digest is of, not a compressed form of them.
    headers = {"User-Agent": "localllm", "Accept-Encoding": "identity"}
    return httpx.AsyncClient(verify=_certificates(), timeout=timeout, follow_redirects=False, headers=headers)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Those that the environment names, or certifi's. Reading them takes long enough to do it once."""
    return httpx.create_ssl_context()


@contextlib.asynccontextmanager
async def open_url(client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
    """GET, following redirects: no credentials to another origin, none from public to private, none to plain http.

    Raises httpx.TransportError as it comes, SourceUnavailable for a redirect that is refused.
    """
    home = httpx.URL(url)
    here = home
    for _ in range(MAX_REDIRECTS):
        async with client.stream(
            "GET", here, headers=headers if _same_origin(here, home) else _public(headers)
        ) as response:
            if not response.has_redirect_location:
                yield response
                return
            # httpx has refused one that is no address.
            target = here.join(response.headers["Location"])
        await _check_redirect(here, target)
        here = target
    raise SourceUnavailable(f"{home.host} redirects without end")


def _same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def _public(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in ("authorization", "cookie")}


async def _check_redirect(origin: httpx.URL, target: httpx.URL) -> None:
    if target.scheme not in ("http", "https") or (origin.scheme, target.scheme) == ("https", "http"):
        raise SourceUnavailable(f"{origin.host} redirects from {origin.scheme} to {target.scheme}, which is refused")
    if target.host != origin.host and await _is_private(target.host) and not await _is_private(origin.host):
        raise SourceUnavailable(
            f"{origin.host} redirects to {target.host}, an address inside a private network, which is refused"
        )


async def _is_private(host: str) -> bool:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_global for entry in found)


def check_status(response: httpx.Response, what: str) -> None:
    """Raise the error that a status means; Retry for those that may pass."""
    code = response.status_code
    if code in (200, 206):
        return
    if code == 401:
        raise Unauthorized(f"{what} needs credentials", hint="For Hugging Face, run `hf auth login` or set HF_TOKEN.")
    if code == 403:
        raise Forbidden(
            f"access to {what} is refused", hint="Accept its licence where it is published, then try again."
        )
    if code in (404, 410):
        raise NotFoundAtSource(f"{what} does not exist at {response.url.host}")
    if is_passing(code):
        raise Retry(f"{response.url.host} answered {code} for {what}", retry_after(response.headers))
    raise SourceUnavailable(f"{response.url.host} answered {code} for {what}")


def is_passing(code: int) -> bool:
    """Whether a status is of the kind that goes away by waiting."""
    return code in (408, 425, 429) or code >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, in either of its two forms (RFC 9110, 10.2.3)."""
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


async def retrying(action: Callable[[], Awaitable[T]], host: str, num_done: Callable[[], int] = lambda: 0) -> T:
    """Await `action()` until it succeeds, with growing pauses; progress by `num_done` (bytes) starts the count anew.

    Raises SourceUnavailable: at once for a server that cannot be reached and has given nothing, otherwise after
    FIRST_ATTEMPTS or MAX_ATTEMPTS attempts without progress.
    """
    failures, before = 0, num_done()
    while True:
        try:
            return await action()
        except (httpx.TransportError, Retry) as error:
            failures = 1 if num_done() > before else failures + 1
            before = num_done()
            if not before and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise unreachable(host, error) from None
            delay = _delay(error, failures)
            if failures >= (MAX_ATTEMPTS if before else FIRST_ATTEMPTS) or delay > MAX_RETRY_AFTER_SECONDS:
                reason = str(error) if isinstance(error, Retry) else f"{host}: {reason_of(error)}"
                raise SourceUnavailable(reason, hint="Try again later; what was downloaded is kept.") from None
            await asyncio.sleep(delay)


def _delay(error: Exception, failures: int) -> float:
    if isinstance(error, Retry) and error.delay is not None:
        return error.delay
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 1), MAX_BACKOFF_SECONDS)


def unreachable(place: str, error: Exception) -> SourceUnavailable:
    """The error for a server that nobody can connect to; `details["place"]` is why its other files are not tried."""
    return SourceUnavailable(
        f"{place} cannot be reached: {reason_of(error)}",
        hint="Check the network connection, then try again.",
        place=place,
    )


def reason_of(error: Exception) -> str:
    """The innermost cause, in a few words: what libraries wrap around it is noise to a person."""
    while isinstance(cause := error.__cause__ or error.__context__, Exception):
        error = cause
    if isinstance(error, TimeoutError | asyncio.TimeoutError | httpx.TimeoutException):
        return "no answer in time"
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__
