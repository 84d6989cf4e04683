"""Hugging Face as a source, asked through huggingface_hub on a fake hub."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.fixtures.hub import COMMIT, Hub, Repo
from tests.fixtures.pulls import REPO, files_of, pull

from localllm.errors import (
    DigestMismatch,
    Forbidden,
    InvalidModelFile,
    LocalLLMError,
    NotFoundAtSource,
    SourceUnavailable,
    Unauthorized,
    Unsupported,
)
from localllm.store import catalog
from localllm.store.library import ModelStore
from localllm.store.sources import Plan, hf
from localllm.store.sources.hf import HuggingFaceSource, RepoFile, choose_file, hub_file, quant_of


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (f"hf.co/{REPO}", "Model-Q4_0.gguf"),
        (f"hf.co/{REPO}:q8_0", "Model-Q8_0.gguf"),
        (f"huggingface.co/{REPO}:Model-Q8_0.gguf", "Model-Q8_0.gguf"),
        (f"https://huggingface.co/{REPO}:Q8_0", "Model-Q8_0.gguf"),
    ],
)
def test_a_repository_is_asked_for_a_quantisation_or_a_file(store: ModelStore, hub: Hub, name: str, file: str) -> None:
    assert pull(store, name).error is None
    assert store.resolve(name.removeprefix("https://")).model_path.read_bytes() == hub.repos[REPO].files[file]
    assert [r for r in hub.web.of(f"/{REPO}/resolve/") if COMMIT not in r.path] == [], "the revision is pinned"


@pytest.mark.parametrize("page", ["resolve", "blob"])
def test_an_address_of_the_hubs_site_is_asked_for_through_the_hub(
    store: ModelStore, hub: Hub, gguf: bytes, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["user/Gated"] = Repo({"sub/m.gguf": gguf}, gated=True, token="hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(store, f"{hub.web.url}/user/Gated/{page}/main/sub/m.gguf?download=true").error is None
    assert store.resolve("m").model_path.read_bytes() == gguf


def test_other_addresses_are_not_the_hubs() -> None:
    assert hub_file(httpx.URL("https://example.org/user/repo/resolve/main/m.gguf")) is None
    assert hub_file(httpx.URL("https://huggingface.co/docs/m.gguf")) is None
    assert hub_file(httpx.URL("https://hf.co/u/r/resolve/v1/m.gguf")) == catalog.HuggingFaceSource(
        "u/r", file="m.gguf", revision="v1"
    )


def test_a_quantisation_that_is_not_there_lists_those_that_are(store: ModelStore, hub: Hub) -> None:
    error = pull(store, f"hf.co/{REPO}:Q2_K").error
    assert isinstance(error, NotFoundAtSource)
    assert error.message.endswith(f"{REPO} has no Q2_K")
    assert "It has Q4_0, Q8_0." in error.hint


def test_a_model_in_several_files_is_refused_before_the_first_byte(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.repos["user/Split-GGUF"] = Repo({"Big-Q4_0-00001-of-00002.gguf": gguf, "Big-Q4_0-00002-of-00002.gguf": gguf})
    error = pull(store, "hf.co/user/Split-GGUF").error
    assert isinstance(error, Unsupported)
    assert "one part of a model in several files" in error.message
    assert hub.web.of("/cdn/") == []


def test_gated_and_missing_repositories_are_told_apart(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, missing = "hf.co/user/Gated-GGUF", "hf.co/user/None-GGUF"
    hub.repos["user/Gated-GGUF"] = Repo({"m-Q4_0.gguf": gguf}, gated=True, token="hf_right")
    outcomes: dict[str, list[LocalLLMError | None]] = {}
    for token in ("", "hf_unknown", "hf_wrong", "hf_right"):
        monkeypatch.setenv("HF_TOKEN", token)
        outcomes[token] = [pull(store, name).error for name in (gated, missing)]
    assert {token: [type(error) for error in errors] for token, errors in outcomes.items()} == {
        "": [Unauthorized, NotFoundAtSource],
        "hf_unknown": [Unauthorized, Unauthorized],
        "hf_wrong": [Forbidden, NotFoundAtSource],
        "hf_right": [type(None), NotFoundAtSource],
    }
    no_token, unknown, wrong = (outcomes[token][0] for token in ("", "hf_unknown", "hf_wrong"))
    assert no_token is not None and "there is no token" in no_token.message and "HF_TOKEN" in no_token.hint
    assert unknown is not None and "does not accept your token" in unknown.message
    assert wrong is not None and "licence is not accepted" in wrong.message and "/user/Gated-GGUF" in wrong.hint


def test_the_token_stays_with_the_hub(store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(store, f"hf.co/{REPO}").error is None
    assert all(r.headers.get("authorization") == "Bearer hf_right" for r in hub.web.of("/api/"))


def test_a_revision_that_is_not_there_is_said_so(hub: Hub) -> None:
    with pytest.raises(NotFoundAtSource, match="no revision v9"):
        resolve(catalog.HuggingFaceSource(REPO, revision="v9"))


def test_a_busy_hub_is_asked_again(store: ModelStore, hub: Hub) -> None:
    hub.api_statuses = [503, 429]
    assert pull(store, f"hf.co/{REPO}").error is None


def test_a_hub_that_stays_busy_is_left_for_the_next_source(store: ModelStore, hub: Hub, index: object) -> None:
    hub.api_statuses = [500] * 100
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert any("answered 500" in status for status in pulled.statuses)


def test_a_file_without_a_digest_is_taken_by_what_it_is(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.repos[REPO].has_lfs = False
    assert pull(store, f"hf.co/{REPO}").error is None
    fetched = len(hub.web.ranges("/cdn/"))
    assert pull(store, f"hf.co/{REPO}:Q4_0").error is None
    assert len(hub.web.ranges("/cdn/")) == fetched, "the same version is not fetched again"


def test_another_file_than_the_catalogue_means_is_refused(hub: Hub) -> None:
    with pytest.raises(DigestMismatch, match="not the file that the catalogue means"):
        resolve(catalog.HuggingFaceSource(REPO, file="Model-Q4_0.gguf", sha256="0" * 64))


def test_a_projector_comes_along(hub: Hub) -> None:
    plan = resolve(catalog.HuggingFaceSource(REPO, quant="Q8_0", mmproj="mmproj-F16.gguf"))
    assert [file.media_type.rpartition(".")[2] for file in plan.files] == ["model", "projector"]


def test_a_damaged_file_at_the_hub_is_refused_and_removed(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.repos[REPO].files["Model-Q4_0.gguf"] = gguf[:-2000]
    error = pull(store, f"hf.co/{REPO}").error
    assert isinstance(error, InvalidModelFile)
    assert files_of(store) == []


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


def test_a_silent_hub_is_given_up_in_time(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_TOTAL_SECONDS", 0.3)
    before = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"the hub 127.0.0.1 cannot be reached: no answer in time"):
        resolve(catalog.HuggingFaceSource(REPO))
    assert time.monotonic() - before < 5


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "two.yaml").write_text(
        "family: two\ntitle: T\ndescription: D.\nlicense: MIT\naliases: {latest: 1b}\n"
        "models: {1b: {repos: [a/b, c/d], quants: [Q4_0]}}\n"
    )
    store = ModelStore(tmp_path / "store", catalog=catalog.Catalog(folder))
    pulled = pull(store, "two")
    assert isinstance(pulled.error, SourceUnavailable)
    assert pulled.error.message == "two:latest: the hub 127.0.0.1 cannot be reached: Connection refused"
    assert pulled.statuses == ["pulling manifest"]


def resolve(spec: catalog.HuggingFaceSource) -> Plan:
    async def run() -> Plan:
        async with httpx.AsyncClient() as client:
            return await HuggingFaceSource(spec).resolve(client)

    return asyncio.run(run())


def files(*names: str) -> list[RepoFile]:
    return [RepoFile(name, 1, "") for name in names]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_0.gguf"], "m-Q4_0.gguf"),
        (["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["m-Q2_K.gguf", "m-BF16.gguf"], "m-BF16.gguf"),
        (["m.gguf", "README.md", "mmproj-m-Q4_0.gguf", "imatrix-Q4_0.gguf"], "m.gguf"),
        (["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf", "m-Q6_K.gguf"], "m-Q6_K.gguf"),
        (["m.Q4_0.gguf", "sub/m.q8_0.gguf"], "m.Q4_0.gguf"),
    ],
)
def test_without_a_wish_what_is_quick_on_a_cpu_is_chosen(names: list[str], chosen: str) -> None:
    assert choose_file(files(*names), file="", quant="", repo="r").name == chosen


@pytest.mark.parametrize("wish", ["q5_k_m", "Q5_K_M", "m-Q5_K_M", "M-q5_k_m.gguf"])
def test_a_wish_is_understood_whatever_its_case(wish: str) -> None:
    assert choose_file(files("m-Q4_0.gguf", "x/m-Q5_K_M.gguf"), file="", quant=wish, repo="r").name == "x/m-Q5_K_M.gguf"


def test_a_file_that_was_renamed_is_found_by_its_quantisation() -> None:
    assert choose_file(files("new-Q4_0.gguf"), file="old-Q4_0.gguf", quant="Q4_0", repo="r").name == "new-Q4_0.gguf"
    with pytest.raises(NotFoundAtSource, match=r"r has no old-Q4_0\.gguf"):
        choose_file(files("new-Q4_0.gguf"), file="old-Q4_0.gguf", quant="", repo="r")


def test_a_repository_without_ggufs_says_so() -> None:
    with pytest.raises(NotFoundAtSource) as caught:
        choose_file(files("model.safetensors"), file="", quant="", repo="r")
    assert "-GGUF" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("m.IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q8_0/m-Q8_0-00001-of-00003.gguf", "Q8_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-bf16.gguf", "BF16"),
        ("qwen3-8b.gguf", ""),
    ],
)
def test_a_quantisation_is_read_from_a_name(name: str, quant: str) -> None:
    assert quant_of(name) == quant


def test_a_mirror_is_called_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert HuggingFaceSource(catalog.HuggingFaceSource("a/b")).label == "the hub mirror.example (a/b)"
    monkeypatch.delenv("HF_ENDPOINT")
    assert HuggingFaceSource(catalog.HuggingFaceSource("a/b")).label == "Hugging Face (a/b)"
