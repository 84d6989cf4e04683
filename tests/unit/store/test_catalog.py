"""The catalogue's loader, and a check of every file that is shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localllm.errors import ConfigError
from localllm.store.catalog import Catalog, CatalogEntry, HuggingFaceSource, WheelSource
from localllm.store.names import ModelName
from localllm.store.sources.hf import quant_of

CATALOG = Catalog()
CAPABILITIES = {"completion", "tools", "thinking", "vision", "embedding", "insert"}
PARAMETERS = {"temperature", "top_k", "top_p", "min_p", "repeat_penalty", "stop", "num_ctx"}
# llama.cpp has repacked CPU kernels for these; throughput grows with the batch.
REPACKED = {"Q4_0", "Q4_K_M", "Q8_0", "IQ4_NL", "MXFP4"}
# Families whose publishers offer nothing repacked that fits one file.
NOT_REPACKED = {"llama4", "moondream", "mxbai-embed-large"}


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
    assert family.title
    assert family.description.endswith(".")
    assert family.license
    for entry in entries(name):
        assert ModelName.parse(f"{name}:{entry.tag}").is_short
        assert set(entry.capabilities) <= CAPABILITIES
        assert set(entry.parameters) <= PARAMETERS
        assert entry.sources


@pytest.mark.parametrize("name", CATALOG.names())
def test_every_source_is_one_that_can_be_asked(name: str) -> None:
    for entry in entries(name):
        for source in entry.sources:
            if isinstance(source, HuggingFaceSource):
                assert re.fullmatch(r"[\w.-]+/[\w.-]+", source.repo)
                assert source.file or source.quant
                if source.file and source.quant:
                    assert quant_of(source.file) == source.quant, (
                        "the file is not of the quantisation that its tag says"
                    )
            if isinstance(source, WheelSource):
                assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
                assert source.size > 0
            assert not source.sha256 or re.fullmatch(r"[0-9a-f]{64}", source.sha256)


@pytest.mark.parametrize("name", sorted(set(CATALOG.names()) - NOT_REPACKED))
def test_latest_is_a_format_with_repacked_kernels(name: str) -> None:
    entry = CATALOG.find(name, "latest")
    assert entry is not None
    (first, *_) = entry.sources
    assert isinstance(first, HuggingFaceSource)
    assert (first.quant or quant_of(first.file)) in REPACKED


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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD + "surprise: 1\n", "surprise"),
        (GOOD.replace("license: MIT\n", ""), "license"),
        (GOOD.replace("stem: B", "stem: [1]"), "models"),
        (GOOD.replace("latest: 1b", "latest: 2b"), "aliases.latest"),
        (GOOD.replace("latest: 1b", "newest: 1b"), "latest"),
        ("{", "demo.yaml"),
    ],
)
def test_a_mistake_is_reported_with_its_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, text).family("demo")
    assert "demo.yaml" in caught.value.message
    assert complaint in caught.value.message


def test_looking_for_one_family_does_not_read_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("{")
    assert write(tmp_path, GOOD).find("demo", "latest") is not None
