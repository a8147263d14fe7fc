"""The tests, and the parts that they share."""

from __future__ import annotations

import os
import sys

# A suite starts hundreds of interpreters: without compiled modules each would spend seconds on compiling its imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
