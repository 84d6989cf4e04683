"""The only package that touches llama.cpp."""

import os

# Threads of GNU OpenMP meet hundreds of times per token and by default spin for milliseconds when one is late. On a
# quiet machine that wins nothing; where another program wants a core, everybody spins for a thread that cannot run, and
# tokens take many times as long (docs/decisions/0003). Read when the native library is loaded, so it is set before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
