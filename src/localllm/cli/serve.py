"""`localllm serve`: the only place from which the command line becomes the daemon."""

from __future__ import annotations

from localllm.config import load_config


def serve(flags: dict[str, str]) -> int:
    """Run the daemon until it is told to stop; returns its exit status. Raises AddressInUse or ConfigError."""
    config = load_config(flags=flags)
    from localllm.daemon import server

    return server.serve(config)
