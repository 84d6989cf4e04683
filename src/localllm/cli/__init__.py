"""The command line."""

import sys

# httpx imports its own command line, and Rich with it, wherever it can: half of the time that it takes to load.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
