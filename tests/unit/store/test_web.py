"""The rules of HTTP that all sources share: redirects, credentials, patience."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Sequence

import httpx
import pytest

from localllm.errors import SourceUnavailable
from localllm.store import web

SECRETS = {"Authorization": "Bearer secret", "Cookie": "session=secret", "Accept": "text/plain"}


def visit(url: str, redirects: dict[str, str]) -> list[httpx.Request]:
    """Open `url` on a net of literal addresses in which `redirects` lead on; returns the requests that were made."""
    made: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        made.append(request)
        target = redirects.get(str(request.url))
        return httpx.Response(302, headers={"Location": target}) if target else httpx.Response(200, text="here")

    async def run() -> None:
        async with (
            httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client,
            web.open_url(client, url, SECRETS) as response,
        ):
            assert response.status_code == 200

    asyncio.run(run())
    return made


@pytest.mark.parametrize(
    ("target", "keeps"),
    [
        ("/there", True),
        ("https://8.8.8.8/there", True),
        ("https://8.8.4.4/there", False),
        ("https://8.8.8.8:8443/there", False),
    ],
)
def test_credentials_stay_at_their_origin(target: str, keeps: bool) -> None:
    last = visit("https://8.8.8.8/here", {"https://8.8.8.8/here": target})[-1]
    assert ("authorization" in last.headers, "cookie" in last.headers) == (keeps, keeps)
    assert last.headers["accept"] == "text/plain"


def test_credentials_are_back_when_the_way_leads_home() -> None:
    way = {"https://8.8.8.8/a": "https://8.8.4.4/b", "https://8.8.4.4/b": "https://8.8.8.8/c"}
    assert [("authorization" in request.headers) for request in visit("https://8.8.8.8/a", way)] == [True, False, True]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "[::1]", "[fd00::1]", "[fe80::1]"]
)
def test_nothing_public_leads_into_a_private_network(host: str) -> None:
    with pytest.raises(SourceUnavailable, match="private network"):
        visit("http://8.8.8.8/a", {"http://8.8.8.8/a": f"http://{host}/b"})


def test_what_is_private_may_lead_on_in_its_network() -> None:
    assert len(visit("http://10.0.0.1/a", {"http://10.0.0.1/a": "http://10.0.0.2/b"})) == 2


@pytest.mark.parametrize("target", ["http://8.8.8.8/b", "ftp://8.8.8.8/b", "file:///etc/passwd"])
def test_redirects_to_worse_are_refused(target: str) -> None:
    with pytest.raises(SourceUnavailable, match="redirects"):
        visit("https://8.8.8.8/a", {"https://8.8.8.8/a": target})


def test_redirects_without_end_are_refused() -> None:
    with pytest.raises(SourceUnavailable, match="without end"):
        visit("https://8.8.8.8/a", {"https://8.8.8.8/a": "/a"})


def test_both_forms_of_retry_after_are_understood() -> None:
    in_an_hour = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert web.retry_after({"Retry-After": "17"}) == 17
    assert web.retry_after({"Retry-After": in_an_hour}) == pytest.approx(3600, abs=60)
    assert web.retry_after({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0


@pytest.mark.parametrize("headers", [{}, {"Retry-After": ""}, {"Retry-After": "soon"}, {"Retry-After": "-1"}])
def test_a_retry_after_that_makes_no_sense_is_none(headers: dict[str, str]) -> None:
    assert web.retry_after(headers) is None


def retry(outcomes: Sequence[Exception | int], num_done: Callable[[], int] = lambda: 0) -> tuple[int, list[float]]:
    """Retry what raises or returns `outcomes` in turn; returns the result and the pauses that were made."""
    pauses: list[float] = []
    left = iter(outcomes)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def action() -> int:
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.store.web.asyncio.sleep", sleep)
        patch.setattr(web, "MAX_BACKOFF_SECONDS", 30.0)
        return asyncio.run(web.retrying(action, "host", num_done)), pauses


def test_pauses_grow_and_a_servers_word_goes_first() -> None:
    assert retry([web.Retry("busy"), web.Retry("busy"), web.Retry("busy", 7.0), 5]) == (5, [0.5, 1.0, 7.0])


def test_progress_earns_more_attempts() -> None:
    broken = httpx.RemoteProtocolError("cut")
    with pytest.raises(SourceUnavailable, match="host: cut"):
        retry([broken] * web.FIRST_ATTEMPTS + [1])
    progress = iter(range(1000))
    assert retry([broken] * 20 + [1], lambda: next(progress))[0] == 1
    with pytest.raises(SourceUnavailable):
        retry([broken] * web.MAX_ATTEMPTS + [1], lambda: 100)


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ConnectTimeout("")])
def test_a_server_out_of_reach_is_not_waited_for_unless_it_has_given_something(error: Exception) -> None:
    with pytest.raises(SourceUnavailable, match=r"host cannot be reached: (refused|no answer in time)"):
        retry([error, 1])
    assert retry([error, 1], lambda: 100) == (1, [0.5])
