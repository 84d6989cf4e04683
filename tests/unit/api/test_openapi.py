"""The description of the API, and the API held to it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from starlette.routing import Route
from tests.unit.api.harness import Daemon, FakeSupervisor, StoreBuilder

from localllm.api.app import create_app
from localllm.api.openapi import document
from localllm.config import Config
from localllm.keys.accounts import Accounts

DOCUMENT = document()
# Sent with GET and HEAD by everything that answers it.
IMPLIED = "HEAD"


def routes(models: StoreBuilder, supervisor: FakeSupervisor) -> set[tuple[str, str]]:
    accounts = Accounts(models.folder / "keys.sqlite")
    app = create_app(Config(), models.store, supervisor, accounts)  # type: ignore[arg-type]
    found = set()
    for route in app.routes:
        assert isinstance(route, Route) and route.methods is not None
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        found |= {(method, path) for method in route.methods if method != IMPLIED or route.methods == {IMPLIED}}
    return found


def test_every_route_is_described(models: StoreBuilder, supervisor: FakeSupervisor) -> None:
    described = {(verb.upper(), path) for path, verbs in DOCUMENT["paths"].items() for verb in verbs}
    missing = routes(models, supervisor) - described
    assert not missing, f"add to api/operations.py: {missing}"


async def test_the_description_is_served_whole(daemon: Daemon) -> None:
    response = await daemon.client.get("/openapi.json")
    assert response.headers["content-type"].startswith("application/json")
    assert response.json() == json.loads(json.dumps(DOCUMENT))


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    for reference in set(re.findall(r'"#/([^"]+)"', text)):
        node: Any = DOCUMENT
        for part in reference.split("/"):
            node = node[part]


def test_shapes_are_named_for_people() -> None:
    assert not [name for name in DOCUMENT["components"]["schemas"] if "localllm" in name or "wire" in name]


def test_fields_that_a_body_refuses_are_named() -> None:
    assert "web_search_options" in DOCUMENT["components"]["schemas"]["ChatCompletionBody"]["description"]


# ---- /docs ----


class Page(HTMLParser):
    """What the page shows, where its links lead, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name == "href":
                self.links.add(value or "")
            if name == "src" or tag == "link":
                self.loads.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_shows_all_and_needs_nothing_from_elsewhere(daemon: Daemon) -> None:
    response = await daemon.client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page()
    page.feed(response.text)
    assert not page.loads
    assert not [link for link in page.links if link != "openapi.json" and link.removeprefix("#") not in page.ids]
    for path in DOCUMENT["paths"]:
        assert path in page.text
    assert "Undefined" not in page.text


EXAMPLES = [
    ("/api/chat", "post_api_chat"),
    ("/v1/messages", "post_v1_messages"),
    ("/v1/chat/completions", "post_v1_chat_completions"),
]


@pytest.mark.parametrize(("path", "id"), EXAMPLES)
async def test_the_pages_examples_work_as_they_are(daemon: Daemon, path: str, id: str) -> None:
    daemon.models.add("smollm2")
    html = (await daemon.client.get("/docs")).text
    section = html[html.index(f'id="{id}"') :]
    example = re.search(r"<textarea[^>]*>(.*?)</textarea>", section, re.DOTALL)
    assert example is not None
    body = json.loads(example[1].replace("&#34;", '"').replace("&#39;", "'"))
    assert (await daemon.client.post(path, json=body)).status_code == 200
