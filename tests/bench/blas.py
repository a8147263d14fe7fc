"""The BLAS that MLX's CPU build computes on: its wheel carries the reference one, which is ten times slower in float32
(16-bit types do not use it). OpenBLAS is preloaded where Debian's libopenblas0-pthread is installed.
"""

from __future__ import annotations

import os
from ctypes.util import find_library
from typing import Final

CHOICES: Final = ("openblas", "reference")


def use(name: str | None) -> str:
    """Have every process that is started from now on compute on this one of CHOICES, on one thread; the line that says
    which. None: OpenBLAS where it is installed. Raises SystemExit where it is asked for and is not."""
    library = find_library("openblas")
    if name == "openblas" and library is None:
        raise SystemExit("OpenBLAS is not installed: apt install libopenblas0-pthread")
    if library is None or name == "reference":
        return "BLAS: the reference one in MLX's wheel"
    os.environ |= {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    return f"BLAS: OpenBLAS ({library}, preloaded, one thread a rank)"
