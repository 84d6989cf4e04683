from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.daemon.test_instance import free_port
from tests.unit.daemon.test_server import launch

from localllm.cli.client import Client
from localllm.config import load_config
from localllm.daemon.exposure import check_certificate, check_openness
from localllm.errors import ConfigError
from localllm.keys.accounts import Accounts
from localllm.keys.key import Key
from localllm.keys.store import KeyStore


def config(**env: Any) -> Any:
    return load_config(file=Path("/nothing"), env={f"LOCALLLM_{key.upper()}": str(value) for key, value in env.items()})


class TestOpenness:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
    def test_this_machine_needs_no_key(self, host: str, tmp_path: Path) -> None:
        check_openness(config(host=host), Accounts(tmp_path / "keys"))

    @pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.7", ":11434"])
    def test_others_need_a_key_or_consent(self, host: str, tmp_path: Path) -> None:
        accounts = Accounts(tmp_path / "keys")
        with pytest.raises(ConfigError, match="LOCALLLM_HOST") as caught:
            check_openness(config(host=host), accounts)
        assert "LOCALLLM_ALLOW_NO_KEY=1" in caught.value.hint
        check_openness(config(host=host, allow_no_key=1), accounts)
        KeyStore(tmp_path / "keys").add(Key("a", b"x"))
        check_openness(config(host=host), accounts)

    def test_the_daemon_does_not_start(self, tmp_path: Path) -> None:
        with launch(port=free_port(), models=tmp_path, host=f"0.0.0.0:{free_port()}") as process:
            assert process.wait(20) == 1
            assert process.stderr is not None
            assert "ALLOW_NO_KEY" in process.stderr.read()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(["openssl", "req", "-x509", *kind, *names, *files], check=True, capture_output=True)
    return folder


class TestCertificate:
    def test_files_that_do_not_exist_or_fit_are_told_at_once(self, certificate: Path, tmp_path: Path) -> None:
        good = {"tls_certificate": certificate / "certificate.pem", "tls_key": certificate / "key.pem"}
        check_certificate(config())
        check_certificate(config(**good))
        for wrong in (
            {"tls_certificate": good["tls_certificate"]},
            {**good, "tls_key": tmp_path / "gone"},
            {"tls_certificate": good["tls_key"], "tls_key": good["tls_key"]},
            {"tls_key": good["tls_key"]},
        ):
            with pytest.raises(ConfigError, match="LOCALLLM_TLS"):
                check_certificate(config(**wrong))

    def test_the_daemon_speaks_https_and_the_command_line_trusts_it(self, certificate: Path, tmp_path: Path) -> None:
        port = free_port()
        settings = {
            "tls_certificate": str(certificate / "certificate.pem"),
            "tls_key": str(certificate / "key.pem"),
            "host": f"127.0.0.1:{port}",
        }
        found = config(**settings)
        assert found.host.url == f"https://127.0.0.1:{port}"
        with launch(port=port, models=tmp_path, **settings) as process:
            try:
                assert process.stderr is not None
                while "listens on" not in process.stderr.readline():
                    assert process.poll() is None
                with Client(found.host, certificate=found.tls_certificate) as client:
                    assert client.call("GET", "/api/tags") == {"models": []}
                with Client(found.host) as client, pytest.raises(Exception, match="certificate verify failed"):
                    client.call("GET", "/api/tags")
                with pytest.raises(httpx.TransportError):
                    httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                with launch(port=port, models=tmp_path, **settings) as second:
                    assert second.wait(20) == 1
                    assert second.stderr is not None
                    assert f"runs on https://127.0.0.1:{port} already" in second.stderr.read()
            finally:
                process.kill()
