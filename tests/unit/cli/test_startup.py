"""What a short command may load: start-up time is counted in modules, as seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.fixtures.fake_daemon import FakeDaemon, Reply

HEAVY = {
    "anthropic",
    "huggingface_hub",
    "jinja2",
    "llama_cpp",
    "numpy",
    "openai",
    "psutil",
    "starlette",
    "uvicorn",
    "uvloop",
    "yaml",
}
LAZY = {
    "rich.console",
    "rich.progress",
    "pygments",
    "httpx._main",
    "localllm.daemon",
    "localllm.api",
    "localllm.store.library",
}
CODE = """
import sys
from localllm.cli import app
sys.argv[1:] and app.execute(sys.argv[1:])
print("\\n".join(name for name, module in sys.modules.items() if module is not None), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["list"], ["run", "m", ""]], ids=" ".join)
def test_short_commands_load_little(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    daemon.on("POST", "/api/generate", Reply({"done": True}))
    monkeypatch.setenv("LOCALLLM_HOST", daemon.url)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert "localllm.cli.app" in loaded
    assert not {name.split(".")[0] for name in loaded} & HEAVY
    assert not loaded & LAZY
