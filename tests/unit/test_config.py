"""Settings: where they come from, which of them wins, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.config import Config, config_file, load_config, settings
from localllm.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def load(file: Path, text: str = "", flags: dict[str, str] | None = None, **env: str) -> Config:
    if text:
        file.write_text(text)
    variables = {f"LOCALLLM_{key.upper()}": value for key, value in env.items()}
    return load_config(file=file, env=variables, flags=flags)


class TestPrecedence:
    def test_without_anything_there_are_defaults(self, file: Path) -> None:
        config = load(file)
        assert (config.context_length, config.keep_alive, config.pin) == (0, 300.0, False)
        assert config.origin("keep_alive") == "default"
        assert config.for_model("tiny:latest") is config

    def test_file_environment_flags(self, file: Path) -> None:
        text = "# mine\ncontext_length: 1024\nmax_queue: 7\nnum_threads: 1\n"
        config = load(file, text, {"num_threads": "3"}, max_queue="8", num_threads="2")
        assert (config.context_length, config.max_queue, config.num_threads) == (1024, 8, 3)
        assert config.origin("context_length") == f"{file}:2"
        assert config.origin("max_queue") == "LOCALLLM_MAX_QUEUE"
        assert config.origin("num_threads") == "--num-threads"

    def test_our_own_variable_goes_before_ollamas(self, file: Path) -> None:
        env = {"OLLAMA_MAX_QUEUE": "1", "LOCALLLM_MAX_QUEUE": "2"}
        assert load_config(file=file, env=env).max_queue == 2
        assert load_config(file=file, env={"OLLAMA_MAX_QUEUE": "1"}).max_queue == 1

    def test_values_are_read_as_they_are_written(self, file: Path) -> None:
        text = "keep_alive: 1h\nspeculate: off\nkv_ram: 1GiB\norigins: [http://a.example, http://b.example]\ndebug:\n"
        config = load(file, text)
        assert (config.keep_alive, config.speculate, config.kv_ram) == (3600.0, False, 1 << 30)
        assert config.origins == ("http://a.example", "http://b.example")
        assert config.debug is False


MODELS = """\
context_length: 2048
model_settings:
  "qwen3:*":
    context_length: 8192
    num_parallel: 2
    kv_cache_type: q8_0
    keep_alive: -1
  Qwen3:8b:
    num_parallel: 1
    num_threads: 3
    gpu_layers: 10
    speculate: false
    pin: true
  smollm2: {context_length: 512}
"""


class TestModels:
    def test_every_entry_that_fits_counts_and_the_last_one_wins(self, file: Path) -> None:
        config = load(file, MODELS).for_model("qwen3:8b")
        found = (config.context_length, config.num_parallel, config.kv_cache_type, config.keep_alive)
        assert found == (8192, 1, "q8_0", None)
        assert (config.num_threads, config.gpu_layers, config.speculate, config.pin) == (3, 10, False, True)
        assert config.origin("num_parallel") == f"{file}:9"
        assert config.origin("context_length") == f"{file}:4"

    def test_a_name_without_a_tag_is_its_latest(self, file: Path) -> None:
        config = load(file, MODELS)
        assert config.for_model("smollm2:latest").context_length == 512
        assert config.for_model("smollm2:1.7b").context_length == 2048

    def test_the_environment_goes_before_the_whole_file(self, file: Path) -> None:
        config = load(file, MODELS, context_length="4096").for_model("qwen3:8b")
        assert (config.context_length, config.num_parallel) == (4096, 1)
        assert config.origin("context_length") == "LOCALLLM_CONTEXT_LENGTH"


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "line", "words"),
        [
            ("\nmax_queue: many\n", 2, '"many" is not a valid max_queue'),
            ("\n\ncontext: 5\n", 3, "unknown setting context"),
            ("max_queue: {a: 1}\n", 1, "max_queue must be a value"),
            ("max_queue: 1\nmax_queue: 2\n", 2, "max_queue is no name, or is there twice"),
            ("- max_queue\n", 1, "the file must be a mapping"),
            ("model_settings: 5\n", 1, "model_settings must be a mapping"),
            ("model_settings:\n  a:\n    max_queue: 5\n", 3, "unknown setting model_settings.a.max_queue"),
            ("model_settings:\n  a:\n    num_parallel: x\n", 3, '"x" is not a valid num_parallel'),
            ("model_settings:\n  a: 5\n", 2, "model_settings.a must be a mapping"),
        ],
    )
    def test_file_line_and_field_are_named(self, file: Path, text: str, line: int, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(file, text)
        assert caught.value.message.startswith(f"{file}:{line}: ")
        assert words in caught.value.message
        assert caught.value.hint

    @pytest.mark.parametrize("text", ["a: [1\n", "a: b: c\n", "\tx: 1\n"])
    def test_what_is_no_yaml_is_told_with_its_line(self, file: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"(?s)cannot be read.*line \d"):
            load(file, text)

    def test_a_variable_is_named(self, file: Path) -> None:
        with pytest.raises(ConfigError, match='LOCALLLM_NUM_PARALLEL: "-1" is not a valid num_parallel'):
            load(file, num_parallel="-1")

    def test_bytes_that_are_no_text(self, file: Path) -> None:
        file.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="cannot be read"):
            load(file)


class TestPlace:
    def test_the_environment_says_where_the_file_is(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file.write_text("max_queue: 9")
        monkeypatch.setenv("LOCALLLM_CONFIG", str(file))
        assert config_file() == file
        assert load_config().max_queue == 9

    def test_a_file_that_was_asked_for_must_be_there(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="LOCALLLM_CONFIG: there is no file"):
            load_config(env={"LOCALLLM_CONFIG": str(file)})

    def test_otherwise_it_is_among_the_users(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert config_file().name == "config.yaml"
        assert load_config(env={}).max_queue == 512


SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.key)
def test_every_setting_is_documented(setting: Any) -> None:
    text = SETTINGS.read_text()
    assert f"| `{setting.key}` " in text
    assert not setting.alias or f"`{setting.alias}`" in text
