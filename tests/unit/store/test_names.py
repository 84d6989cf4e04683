from __future__ import annotations

import pytest

from localllm.errors import InvalidName
from localllm.store.names import ModelName, name_from_stem


@pytest.mark.parametrize(
    ("text", "full", "display"),
    [
        ("llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2:1b", "llama3.2:1b"),
        ("me/mine", "registry.ollama.ai/me/mine:latest", "me/mine:latest"),
        ("hf.co/user.name/Repo-GGUF:Q4_0", "hf.co/user.name/Repo-GGUF:Q4_0", "hf.co/user.name/Repo-GGUF:Q4_0"),
        ("localhost:5000/ns/m", "localhost:5000/ns/m:latest", "localhost:5000/ns/m:latest"),
        ("https://example.com/ns/m:t", "example.com/ns/m:t", "example.com/ns/m:t"),
        ("HTTP://example.com/ns/m", "example.com/ns/m:latest", "example.com/ns/m:latest"),
        ("  spaced  ", "registry.ollama.ai/library/spaced:latest", "spaced:latest"),
    ],
)
def test_names_are_filled_in_and_shown_in_their_shortest_form(text: str, full: str, display: str) -> None:
    name = ModelName.parse(text)
    assert (name.full, name.display) == (full, display)
    assert ModelName.parse(name.display) == name


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "model"),
        ("a:", "tag"),
        (":tag", "model"),
        ("a b", "model"),
        ("../etc/passwd", "host"),
        ("x/..:y", "model"),
        ("a/b/c/d", "too many parts"),
        ("a/b.c/", "model"),
        ("ns.dot/model", "namespace"),
        ("m:" + "t" * 81, "tag"),
        ("-m", "model"),
        ("m\x00", "model"),
        ("https://http://m", "namespace"),
        ("m@sha256:abc", "model"),
    ],
)
def test_bad_names_are_refused_with_the_part_that_is_wrong(text: str, part: str) -> None:
    with pytest.raises(InvalidName) as caught:
        ModelName.parse(text)
    assert part in caught.value.message


def test_a_refusal_repeats_no_more_of_a_name_than_a_terminal_should_show() -> None:
    with pytest.raises(InvalidName) as caught:
        ModelName.parse("\x1b[31m" * 100_000)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def test_names_that_differ_only_in_case_have_the_same_key() -> None:
    assert ModelName.parse("LLaMA3:8B").key == ModelName.parse("llama3:8b").key


@pytest.mark.parametrize(
    ("stem", "name"), [("My Model (v2)", "my-model-v2:latest"), ("...", "model:latest"), ("a.Q4_0", "a.q4_0:latest")]
)
def test_a_files_stem_makes_a_valid_name(stem: str, name: str) -> None:
    assert ModelName.parse(name_from_stem(stem).display).display == name
