"""The tests, and the parts that they share."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

# A suite starts hundreds of interpreters: without compiled modules each would spend seconds on compiling its imports,
# and those with mlx-lm another second on what transformers finds out anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# In the background of a shell it is ignored, also by whatever the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
IMPORTS = [Path(__file__).parent / "imports"] if "PYTEST_VERSION" in os.environ else []
"""On the path of whatever the tests start, see its sitecustomize; a benchmark measures what a user has."""
if IMPORTS:
    os.environ.setdefault("PYTHONPATH", str(IMPORTS[0]))
    # Nothing here multiplies with numpy: each import of it would start a thread for every core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Of use to pytest itself, too.
    importlib.import_module("tests.imports.sitecustomize")
