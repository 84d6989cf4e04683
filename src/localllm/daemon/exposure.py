"""Before the daemon listens: nobody beyond this machine gets in by oversight, and a certificate can be used."""

from __future__ import annotations

import ssl

from localllm.config import Config
from localllm.errors import ConfigError
from localllm.keys.accounts import Accounts


def check_openness(config: Config, accounts: Accounts) -> None:
    """Raises ConfigError for an address that other machines can reach, without a key and without consent to that."""
    if config.host.is_loopback or config.allow_no_key or accounts.keys():
        return
    where = f"{config.host.host}:{config.host.port} (from {config.origin('host')})"
    raise ConfigError(
        f"{where} can be reached from other machines, and there is no API key",
        hint="Make a key with `localllm keys add NAME`; or set LOCALLLM_ALLOW_NO_KEY=1 to let in whoever comes.",
    )


def check_certificate(config: Config) -> None:
    """Raises ConfigError for TLS files that cannot be used."""
    if config.tls_certificate is None:
        if config.tls_key is not None:
            raise ConfigError(
                f"{config.origin('tls_key')} names a key without a certificate", hint="Set LOCALLLM_TLS_CERTIFICATE."
            )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ValueError) as error:
        files = " and ".join(str(path) for path in (config.tls_certificate, config.tls_key) if path is not None)
        raise ConfigError(
            f"{files} (from {config.origin('tls_certificate')}) cannot be used for TLS: {error}",
            hint="LOCALLLM_TLS_CERTIFICATE and LOCALLLM_TLS_KEY must be PEM files that belong together.",
        ) from None
