"""The catalogue's loader, and a check of every file that is shipped."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from localllm.api.options import parse_options
from localllm.errors import ConfigError
from localllm.store import catalog as catalog_module
from localllm.store.catalog import Catalog, CatalogEntry, HuggingFaceSource, WheelSource
from localllm.store.names import ModelName
from localllm.store.sources import is_split
from localllm.store.sources.hf import quant_of

CATALOG = Catalog()
# llama.cpp has repacked CPU kernels for these; throughput grows with the batch.
REPACKED = {"Q4_0", "Q4_K_M", "Q8_0", "IQ4_NL", "MXFP4"}
# Families of which no repository has a repacked format in one file.
NOT_REPACKED = {"llama4", "moondream"}


@functools.cache
def entries(family: str) -> list[CatalogEntry]:
    found = [CATALOG.find(family, tag) for tag in CATALOG.tags(family)]
    assert None not in found, "a tag that is listed must be found"
    return [entry for entry in found if entry]


def test_there_are_the_families_that_people_ask_for() -> None:
    asked_for = """llama3 llama3.1 llama3.2 llama3.3 qwen2.5 qwen2.5-coder qwen3 qwen3-coder gemma3 gemma4 phi4 mistral
        mistral-nemo mistral-small devstral deepseek-r1 gpt-oss smollm2 smollm3 granite olmo command-r glm ministral
        nemotron nomic-embed-text all-minilm bge-m3 mxbai-embed-large embeddinggemma qwen3-embedding llava qwen2.5-vl"""
    assert set(asked_for.split()) <= set(CATALOG.names())
    assert len(CATALOG.names()) >= 40


@pytest.mark.parametrize("name", CATALOG.names())
def test_every_file_is_well_formed(name: str) -> None:
    family = CATALOG.family(name)
    assert family is not None
    assert family.family == name
    assert family.description.endswith(".")
    for entry in entries(name):
        assert ModelName.parse(f"{name}:{entry.tag}").is_short
        assert entry.sources
        assert ("embedding" in entry.capabilities) != ("completion" in entry.capabilities)


@pytest.mark.parametrize("name", CATALOG.names())
def test_every_default_is_one_that_requests_know(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for entry in entries(name):
        parse_options(entry.parameters, {})
    assert "is ignored" not in caplog.text


@pytest.mark.parametrize("name", CATALOG.names())
def test_a_model_that_sees_comes_with_its_projector(name: str) -> None:
    for entry in entries(name):
        for source in entry.sources:
            assert isinstance(source, HuggingFaceSource) or "vision" not in entry.capabilities
            assert bool(getattr(source, "mmproj", "")) == ("vision" in entry.capabilities)


@pytest.mark.parametrize("name", CATALOG.names())
def test_the_quantisation_of_a_tag_is_that_of_its_files(name: str) -> None:
    for entry in entries(name):
        for source in entry.sources:
            assert isinstance(source, HuggingFaceSource | WheelSource)
            file = source.file if isinstance(source, HuggingFaceSource) else source.member
            quant = (source.quant if isinstance(source, HuggingFaceSource) else "") or quant_of(file)
            assert not file or quant_of(file) == quant
            assert not is_split(file), "a model in parts cannot be pulled"
            named = quant_of(f"-{entry.tag}.gguf")
            assert named in ("", quant)


@pytest.mark.parametrize("name", sorted(set(CATALOG.names()) - NOT_REPACKED))
def test_latest_is_a_format_with_repacked_kernels(name: str) -> None:
    entry = CATALOG.find(name, "latest")
    assert entry is not None
    (first, *_) = entry.sources
    assert isinstance(first, HuggingFaceSource)
    assert (first.quant or quant_of(first.file)).removeprefix("UD-") in REPACKED


def test_the_demo_model_can_be_had_without_a_hub() -> None:
    entry = CATALOG.find("smollm2", "latest")
    assert entry is not None
    assert [source.__class__ for source in entry.sources][-1] is WheelSource


def test_tags_are_found_whatever_their_case() -> None:
    upper, lower = CATALOG.find("QWEN3", "8B-Q4_K_M"), CATALOG.find("qwen3", "8b-q4_k_m")
    assert upper is not None
    assert upper == lower
    assert CATALOG.find("qwen3", "999b") is None
    assert CATALOG.find("no-such-family", "latest") is None


@pytest.mark.parametrize(
    ("text", "near"),
    [("qwen33", "qwen3"), ("lama3.2", "llama3.2"), ("deepseekr1", "deepseek-r1"), ("gemma3:5b", "gemma3:4b")],
)
def test_near_names_are_suggested(text: str, near: str) -> None:
    assert near in CATALOG.suggest(text)


GOOD = """
family: demo
title: Demo
description: A demo.
license: MIT
models: {1b: {repos: [a/b], stem: B}}
aliases: {latest: 1b}
"""


def write(folder: Path, text: str) -> Catalog:
    (folder / "demo.yaml").write_text(text)
    return Catalog(folder)


def test_a_size_makes_a_tag_per_quantisation(tmp_path: Path) -> None:
    catalog = write(tmp_path, GOOD)
    assert catalog.tags("demo") == ["latest", "1b", "1b-q4_k_m", "1b-q4_0", "1b-q8_0"]
    entry = catalog.find("demo", "1b-q8_0")
    assert entry is not None
    assert entry.sources == (HuggingFaceSource("a/b", file="B-Q8_0.gguf", quant="Q8_0"),)


BOTH = "{repos: [a/b], sources: [{kind: hf, repo: a/b, quant: Q8_0}]}"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("title", "surprise: 1\ntitle", "unknown field `surprise`"),
        ("license: MIT", "", "`license`"),
        ("license: MIT", "license: ''", "`$.license`"),
        ("title", "parameters: {temprature: 1}\ntitle", "unknown field `temprature` - at `$.parameters`"),
        ("title", "capabilities: [seeing]\ntitle", "$.capabilities"),
        ("family: demo", "family: other", "family is other"),
        ("stem: B", "stem: [1]", "models.1b: Expected `str`, got `array` - at `$.stem`"),
        ("stem: B", "stem: B, color: red", "models.1b: Object contains unknown field `color`"),
        ("a/b", "just-a-name", "models.1b"),
        ("{repos: [a/b], stem: B}", "{stem: B}", "models.1b: either repos or sources"),
        ("{repos: [a/b], stem: B}", BOTH, "models.1b: either repos or sources"),
        ("{repos: [a/b], stem: B}", "{sources: [{kind: hf, repo: a/b}]}", "models.1b: the source a/b needs a file"),
        (
            "{repos: [a/b], stem: B}",
            "{sources: [{kind: ftp}]}",
            "models.1b: Invalid value 'ftp' - at `$.sources[0].kind`",
        ),
        ("stem: B", "stem: B, quants: []", "models.1b: quants"),
        ("stem: B}", "stem: B}, 1B: {repos: [a/b]}", "models make a tag twice"),
        ("stem: B}", "stem: B}, 1b: {repos: [a/b]}", "1b is written twice"),
        ("latest: 1b", "latest: 2b", "aliases.latest names the unknown tag 2b"),
        ("latest: 1b", "latest: 1b, 1B-Q8_0: 1b", "aliases.1B-Q8_0 is a tag of its own"),
        ("latest: 1b", "newest: 1b", "aliases must name latest"),
        ("title", "{", "line"),
    ],
)
def test_a_mistake_is_reported_with_its_file_and_field(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, GOOD.replace(old, new, 1)).family("demo")
    assert caught.value.message.startswith("demo.yaml: ")
    assert complaint in caught.value.message


@pytest.mark.parametrize("digest", ["ab", "A" * 64, "sha256:" + "a" * 64])
def test_a_digest_must_be_one(tmp_path: Path, digest: str) -> None:
    source = f"{{sources: [{{kind: hf, repo: a/b, quant: Q8_0, sha256: '{digest}'}}]}}"
    with pytest.raises(ConfigError, match=r"\$\.sources\[0\]\.sha256"):
        write(tmp_path, GOOD.replace("{repos: [a/b], stem: B}", source)).family("demo")


def test_looking_for_one_family_does_not_read_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("{")
    assert write(tmp_path, GOOD).find("demo", "latest") is not None


@pytest.mark.parametrize("place", ["site-packages/localllm/modelfiles", "modelfiles"])
def test_the_shipped_files_are_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    top = "site-packages" if place.startswith("site") else "src"
    module = tmp_path / top / "localllm/store/catalog.py"
    monkeypatch.setattr(catalog_module, "__file__", str(module))
    (tmp_path / place).mkdir(parents=True)
    write(tmp_path / place, GOOD)
    assert Catalog().names() == ["demo"]
