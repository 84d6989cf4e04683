"""One-time set-up of the native library: its log goes to Python's logging, and its last errors are kept."""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
from typing import Any

import llama_cpp as lib

_log = logging.getLogger("llama.cpp")
# ggml.h: 1 debug, 2 info, 3 warning, 4 error, 5 continues a line. Informational lines come by the hundred at each load;
# they matter only to someone who debugs a load.
_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_last_errors: collections.deque[str] = collections.deque(maxlen=8)


def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == 4 and line:
        _last_errors.append(line)
    if line:
        _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


# The native side keeps this pointer for the life of the process, so the object must live as long.
_callback: Any = lib.llama_log_callback(_on_log)


@functools.cache
def init() -> None:
    """Prepare the library; further calls do nothing."""
    lib.llama_log_set(_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()


def last_errors() -> str:
    """What the library complained about most recently, one line per complaint."""
    return "\n".join(_last_errors)


def system_info() -> str:
    """The instruction sets and back ends that this build of the library uses."""
    return str(lib.llama_print_system_info().decode("utf-8", "replace")).strip()


def version() -> str:
    """The version of the binding, and with it of the llama.cpp that it was built from."""
    return str(lib.__version__)


def supports_gpu() -> bool:
    return bool(lib.llama_supports_gpu_offload())
