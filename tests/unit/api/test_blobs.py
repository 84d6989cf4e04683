"""Files that come before the model that is made of them, and the routes of a cloud that is not there."""

from __future__ import annotations

import hashlib

import pytest
from tests.unit.api.harness import Daemon

DATA = b"GGUF" + bytes(3 << 20)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


async def test_a_file_is_taken_in_once(daemon: Daemon) -> None:
    path = f"/api/blobs/{DIGEST}"
    assert (await daemon.client.head(path)).status_code == 404
    assert (await daemon.client.post(path, content=DATA)).status_code == 201
    assert (await daemon.client.head(path)).status_code == 200
    assert (await daemon.client.post(path, content=b"not even read")).status_code == 200
    assert daemon.models.store.blobs.path(DIGEST).read_bytes() == DATA


async def test_what_does_not_match_its_digest_leaves_nothing(daemon: Daemon) -> None:
    response = await daemon.client.post(f"/api/blobs/{DIGEST}", content=b"something else")
    assert response.status_code == 400
    assert response.json()["error"].startswith(f'digest mismatch, expected "{DIGEST}", got "sha256:')
    assert not daemon.models.store.blobs.has(DIGEST)
    assert not list(daemon.models.store.blobs.folder.glob("*-partial*"))


@pytest.mark.parametrize("digest", ["sha256:../../x", "sha256:" + "a" * 63, "sha256:" + "a" * 65, "md5:" + "a" * 64])
async def test_digests_are_checked_before_anything_is_written(daemon: Daemon, digest: str) -> None:
    response = await daemon.client.post(f"/api/blobs/{digest}", content=DATA)
    assert response.status_code in (400, 404)
    assert str(daemon.models.folder) not in response.text


async def test_ollamas_cloud_is_switched_off(daemon: Daemon) -> None:
    client = daemon.client
    assert (await client.get("/api/status")).json() == {"cloud": {"disabled": True, "source": "config"}}
    assert (await client.get("/api/experimental/model-recommendations")).json() == {"recommendations": []}
    response = await client.post("/api/me")
    assert (response.status_code, response.json()["error"]) == (401, "unauthorized")
    assert (await client.post("/api/experimental/web_search", json={"query": "x"})).status_code == 403
