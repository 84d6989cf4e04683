"""One daemon per address: own the port and say so, or say clearly who else does.

The bound port is what excludes others; the lock closes the gap between two daemons that start at the same moment, and
the pid file is for people. The system drops both locks with the process, so that nothing is stale after a kill -9.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from localllm.config import Address, Config, state_dir
from localllm.errors import AddressInUse, ConfigError

if TYPE_CHECKING:
    import httpx

BACKLOG = 2048
_PROBE_SECONDS = 2.0
_LOCK_SECONDS = 3.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def claim(config: Config) -> Iterator[socket.socket]:
    """A socket that listens where the configuration says, for as long as the context lasts.

    Raises AddressInUse, which tells a daemon of ours (with its pid), an Ollama server and anything else apart; or
    ConfigError when the address is not one to listen on.
    """
    address = config.host
    if address.scheme != ("http" if config.tls_certificate is None else "https"):
        raise ConfigError(
            f"{config.origin('host')}: the daemon cannot listen on {address.scheme}://",
            hint="Leave the scheme out. For TLS, set LOCALLLM_TLS_CERTIFICATE.",
        )
    if _is_answered(address):
        raise describe_owner(address)
    with _lock(address):
        sock = _bind(config)
        try:
            yield sock
        finally:
            sock.close()


@contextlib.contextmanager
def _lock(address: Address) -> Iterator[None]:
    """Hold the lock file and show our pid. Without a writable state folder the port alone must do."""
    stem = state_dir() / f"daemon-{re.sub(r'[^0-9A-Za-z.]+', '_', address.host)}-{address.port}"
    lock, pid_file = filelock.FileLock(stem.with_name(stem.name + ".lock")), stem.with_name(stem.name + ".pid")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        # One that is just stopping lets go in a moment, and one that is just starting answers by then.
        lock.acquire(timeout=_LOCK_SECONDS)
        pid_file.write_text(f"{os.getpid()}\n")
    except filelock.Timeout:
        raise describe_owner(address, pid=_read_pid(pid_file)) from None
    except OSError as error:
        _log.warning("no lock and pid file: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if lock.is_locked:
                pid_file.unlink(missing_ok=True)
            lock.release()


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _is_answered(address: Address) -> bool:
    """Whether somebody listens there: some systems let a specific address be bound below somebody's wildcard."""
    host = Address(address.host, address.port).url.split("//")[1].rpartition(":")[0].strip("[]")
    try:
        socket.create_connection((host, address.port), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _bind(config: Config) -> socket.socket:
    address = config.host
    try:
        family, *_, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        is_dual = family == socket.AF_INET6 and address.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(target[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise describe_owner(address) from None
        where = f"{address.host}:{address.port} (from {config.origin('host')})"
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {where}: {reason}", hint="Set LOCALLLM_HOST to an address of this machine."
        ) from None


def describe_owner(address: Address, *, pid: int | None = None) -> AddressInUse:
    """The error that says who has the address. `pid` is that of the daemon that holds our lock, if it is known."""
    url = Address(address.host, address.port, address.scheme).url
    elsewhere = f"LOCALLLM_HOST=127.0.0.1:{address.port + 1}"
    health = _get(f"{url}/health")
    if health is not None and (owner := _our_pid(health)):
        return AddressInUse(
            f"localllm runs on {url} already (pid {owner})",
            hint=f"Use it as it is, stop it with `kill {owner}`, or take another port: {elsewhere}.",
            pid=owner,
            owner="localllm",
        )
    if pid is not None and health is None:
        return AddressInUse(
            f"another localllm (pid {pid}) is starting or stopping on {url}",
            hint=f"Try again in a moment, or take another port: {elsewhere}.",
            pid=pid,
            owner="localllm",
        )
    root = _get(url) if health is not None else None
    if root is not None and "Ollama is running" in root.text:
        return AddressInUse(
            f"an Ollama server has {url}",
            hint=f"Stop it (for example `systemctl stop ollama`), or run beside it: {elsewhere}.",
            owner="ollama",
        )
    return AddressInUse(
        f"another program has {url}", hint=f"Stop it, or take another port: {elsewhere}.", owner="unknown"
    )


def _get(url: str) -> httpx.Response | None:
    """The answer of whoever listens there; None when it gives none. Never through a proxy."""
    # Only needed when the port is taken, and slow to import: it would be a fifth of the daemon's start.
    import httpx

    try:
        # Who it says it is matters only for the words of an error, so the certificate need not be ours.
        return httpx.get(url, timeout=_PROBE_SECONDS, trust_env=False, verify=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def _our_pid(health: httpx.Response) -> int | None:
    try:
        body = health.json()
        return int(body["pid"]) if body["server"] == "localllm" else None
    except (ValueError, TypeError, KeyError):
        return None
