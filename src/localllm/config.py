"""All settings: one frozen Config, one table that names every key, its environment variables and its meaning.

Precedence, lowest first: default, configuration file, its settings for single models, environment, command-line flag;
what a Modelfile or a request says goes before all of these. `Config.origin` tells where each value came from, so that
an error can say which setting to change.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import platformdirs

from localllm import config_file as config_file_module
from localllm.config_file import Setting
from localllm.errors import ConfigError, InvalidRequest

APP = "localllm"
DEFAULT_PORT = 11434
# Names the configuration file; it cannot be set in that file itself.
CONFIG_ENV = "LOCALLLM_CONFIG"

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_duration(text: str) -> float | None:
    """Seconds in a Go-style duration ("5m", "1h30m", "250ms") or a bare number of seconds. None means forever.

    Negative values mean forever, as in Ollama. Raises InvalidRequest for anything else.
    """
    text = text.strip()
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if re.fullmatch(r"\d+(\.\d*)?", body):
        seconds = float(body)
    elif body and _DURATION_PART.sub("", body) == "":
        seconds = sum(float(n) * _UNIT_SECONDS[unit] for n, unit in _DURATION_PART.findall(body))
    else:
        raise InvalidRequest(f'"{text}" is not a duration', hint='Write it like "5m", "90s", "1h30m", 0 or -1.')
    return None if sign < 0 and seconds > 0 else seconds


def parse_size(text: str) -> int:
    """Bytes in "512MB" (powers of 1000), "2GiB" (powers of 1024) or a bare number."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f'"{text}" is not a size', hint='Write it like "2GiB", "500MB" or a number of bytes.')
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


@dataclass(frozen=True)
class Address:
    """Where the daemon listens, or where a client finds it."""

    host: str
    port: int
    scheme: str = "http"
    path: str = ""

    @property
    def url(self) -> str:
        """Base URL for a client. An unspecified bind address is reached through loopback."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{self.path}"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_address(text: str) -> Address:
    """`[scheme://][host][:port][/path]`, the grammar of OLLAMA_HOST. Raises InvalidRequest on a bad port."""
    text = text.strip().strip("\"'")
    scheme, has_scheme, rest = text.partition("://")
    if not has_scheme:
        scheme, rest = "http", text
    default_port = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT) if has_scheme else DEFAULT_PORT
    if rest.count(":") > 1 and not rest.startswith("["):
        rest = f"[{rest}]"
    try:
        parts = urlsplit(f"//{rest}")
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f'"{text}" is not an address: {error}', hint="Write it like 127.0.0.1:11434.") from None
    host = parts.hostname
    if host is None:
        host = "0.0.0.0" if rest.startswith(":") else "127.0.0.1"
    return Address(host, port or default_port, scheme, parts.path.rstrip("/"))


def _boolean(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "f", "false", "no", "off")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("it must not be negative")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = {"1": "on", "true": "on", "0": "off", "false": "off"}.get(text.lower(), text.lower())
        value = value if value in choices else text.lower()
        if value not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return value

    return parse


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _default_models() -> Path:
    return platformdirs.user_data_path(APP) / "models"


def _setting(
    default: Any, parse: Callable[[str], Any], help: str, ollama: str = "", *, is_of_models: bool = False
) -> Any:
    """A Config field: its environment variable is LOCALLLM_<NAME>, `ollama` names the alias without its prefix.

    `is_of_models`: the configuration file may set it for single models.
    """
    alias = f"OLLAMA_{ollama}" if ollama else ""
    metadata = {"parse": parse, "help": help, "alias": alias, "is_of_models": is_of_models}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSettings:
    """What the configuration file says about the models whose names match `pattern`, and where it says so."""

    pattern: str
    values: Mapping[str, Any]
    origin_of: Mapping[str, str]


@dataclass(frozen=True)
class Config:
    host: Address = _setting(
        lambda: Address("127.0.0.1", DEFAULT_PORT),
        parse_address,
        "Where the daemon listens and where the command line finds it.",
        "HOST",
    )
    models: Path = _setting(
        _default_models, _path, "Folder of the model store (Ollama's layout, so one of Ollama's works too).", "MODELS"
    )
    keep_alive: float | None = _setting(
        300.0,
        parse_duration,
        "How long an idle model stays loaded; negative is forever, 0 unloads at once.",
        "KEEP_ALIVE",
        is_of_models=True,
    )
    num_parallel: int = _setting(
        0,
        _count,
        "Requests that one model decodes at a time; 0 chooses from memory and cores.",
        "NUM_PARALLEL",
        is_of_models=True,
    )
    max_loaded_models: int = _setting(
        0, _count, "Models resident at a time; 0 means three per accelerator, or three.", "MAX_LOADED_MODELS"
    )
    max_queue: int = _setting(
        512, _count, "Requests that may wait for one model before more are refused with 503.", "MAX_QUEUE"
    )
    context_length: int = _setting(
        0,
        _count,
        "Default window in tokens of each request; 0 means 4096, or the model's own if shorter.",
        "CONTEXT_LENGTH",
        is_of_models=True,
    )
    load_timeout: float | None = _setting(
        300.0, parse_duration, "A load that makes no progress for this long is given up.", "LOAD_TIMEOUT"
    )
    num_threads: int = _setting(
        0, _count, "Threads of a runner; 0 means the cores that this process may use.", is_of_models=True
    )
    leave_cores: int = _setting(0, _count, "Cores that runners leave to other programs.")
    kv_cache_type: str = _setting(
        "f16",
        _one_of("f16", "q8_0", "q4_0"),
        "Type of the KV cache: f16, q8_0 or q4_0.",
        "KV_CACHE_TYPE",
        is_of_models=True,
    )
    gpu_layers: int = _setting(-1, int, "Layers that go to a GPU; -1 chooses as many as fit.", is_of_models=True)
    pin: bool = _setting(
        False, _boolean, "Models, once loaded, stay in memory and make no room for others.", is_of_models=True
    )
    kv_unified: bool = _setting(
        False,
        _boolean,
        "One KV memory of a single window for all requests of a model: less memory, less speed.",
        is_of_models=True,
    )
    flash_attention: str = _setting(
        "auto", _one_of("auto", "on", "off"), "Flash attention: auto, on or off.", "FLASH_ATTENTION", is_of_models=True
    )
    target_itl: float | None = _setting(
        0.1,
        parse_duration,
        "Longest time that somebody else's prompt may add to the gap between two tokens.",
        is_of_models=True,
    )
    speculate: bool = _setting(
        True,
        _boolean,
        "Guess tokens that a text repeats and check several at once; answers stay the same.",
        is_of_models=True,
    )
    kv_ram: int = _setting(
        2 << 30,
        parse_size,
        "Memory in which each model keeps the prefixes of earlier prompts; 0 for none.",
        is_of_models=True,
    )
    kv_disk: int = _setting(
        4 << 30, parse_size, "Disk space in which all models keep prefixes across restarts; 0 for none."
    )
    origins: tuple[str, ...] = _setting((), _words, "More browser origins that may call the daemon.", "ORIGINS")
    allow_no_key: bool = _setting(
        False, _boolean, "Listen beyond this machine although no API key protects the daemon."
    )
    api_key: str = _setting("", str, "API key that the command line sends, where the daemon wants one.")
    tls_certificate: Path | None = _setting(
        None, _path, "Certificate chain (PEM): the daemon then speaks HTTPS, and the command line trusts it."
    )
    tls_key: Path | None = _setting(None, _path, "Private key (PEM) of the certificate, if it is not in the same file.")
    drain_timeout: float | None = _setting(
        10.0, parse_duration, "How long running requests may go on after the daemon was told to stop."
    )
    debug: bool = _setting(False, _boolean, "Log more.", "DEBUG")
    origin_of: Mapping[str, str] = field(default_factory=dict)
    of_models: tuple[ModelSettings, ...] = ()

    def for_model(self, name: str) -> Config:
        """The settings for one model, by its full display name ("qwen3:latest"). Later entries of the file win."""
        names = (name.lower(), name.lower().removesuffix(":latest"))
        found = [s for s in self.of_models if any(fnmatchcase(name, s.pattern.lower()) for name in names)]
        if not found:
            return self
        values = {key: value for settings in found for key, value in settings.values.items()}
        origin_of = {key: origin for settings in found for key, origin in settings.origin_of.items()}
        return dataclasses.replace(self, **values, origin_of={**self.origin_of, **origin_of})

    def origin(self, key: str) -> str:
        """Where the value of `key` came from: "default", a file path, or an environment variable's name."""
        return self.origin_of.get(key, "default")


@dataclass(frozen=True)
class SettingInfo:
    """One row of the settings table: what the documentation and `serve --help` print."""

    key: str
    env: str
    alias: str
    help: str


def settings() -> list[SettingInfo]:
    return [
        SettingInfo(f.name, f"LOCALLLM_{f.name.upper()}", f.metadata["alias"], f.metadata["help"])
        for f in dataclasses.fields(Config)
        if f.metadata
    ]


def config_file() -> Path:
    """Where the settings are read from, whether there is such a file or not."""
    return _config_file(os.environ)


def _config_file(env: Mapping[str, str]) -> Path:
    """Raises ConfigError for a file that was asked for and is not there."""
    named = env.get(CONFIG_ENV, "").strip()
    if not named:
        return platformdirs.user_config_path(APP) / "config.yaml"
    path = Path(named).expanduser()
    if not path.is_file():
        raise ConfigError(f"{CONFIG_ENV}: there is no file {path}", hint="Create it, or take the variable away.")
    return path


def keys_file() -> Path:
    """Of this user's daemon, whichever address it listens on."""
    return platformdirs.user_data_path(APP) / "keys.sqlite"


def kv_folder() -> Path:
    return platformdirs.user_cache_path(APP) / "kv"


def log_file() -> Path:
    return platformdirs.user_log_path(APP) / "daemon.log"


def state_dir() -> Path:
    return platformdirs.user_state_path(APP)


def load_config(
    *, file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Config:
    """Read all sources, lowest precedence first. Raises ConfigError that names the setting and its source."""
    env = os.environ if env is None else env
    file = _config_file(env) if file is None else file
    known = [f.name for f in dataclasses.fields(Config) if f.metadata]
    known_of_models = [f.name for f in dataclasses.fields(Config) if f.metadata.get("is_of_models")]
    read = config_file_module.read(file, known, known_of_models)
    fixed: dict[str, tuple[str, str]] = {}
    for info in settings():
        for name in filter(None, (info.alias, info.env)):
            value = env.get(name, "").strip().strip("\"'")
            if value:
                fixed[info.key] = (value, name)
    for key, value in (flags or {}).items():
        fixed[key] = (value, f"--{key.replace('_', '-')}")
    raw = {**{key: (setting.text, setting.where) for key, setting in read.own.items()}, **fixed}
    values = {key: _parse(key, text, origin) for key, (text, origin) in raw.items()}
    if values.get("tls_certificate"):
        host = values.get("host", Address("127.0.0.1", DEFAULT_PORT))
        values["host"] = dataclasses.replace(host, scheme="https")
    return Config(
        **values,
        origin_of={key: origin for key, (_, origin) in raw.items()},
        of_models=tuple(_of_model(pattern, of_model, fixed) for pattern, of_model in read.of_models),
    )


def _of_model(pattern: str, of_model: Mapping[str, Setting], fixed: Collection[str]) -> ModelSettings:
    """What the environment or a flag says goes before the file, whatever it is about."""
    values = {key: _parse(key, setting.text, setting.where) for key, setting in of_model.items()}
    return ModelSettings(
        pattern,
        {key: value for key, value in values.items() if key not in fixed},
        {key: setting.where for key, setting in of_model.items() if key not in fixed},
    )


def _parse(key: str, text: str, origin: str) -> Any:
    metadata = Config.__dataclass_fields__[key].metadata
    try:
        return metadata["parse"](text)
    except (ValueError, InvalidRequest) as error:
        hint = getattr(error, "hint", "") or metadata["help"]
        raise ConfigError(f'{origin}: "{text}" is not a valid {key}: {error}', hint=hint) from None
