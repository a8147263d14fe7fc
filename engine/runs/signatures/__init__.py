"""What MLX, mlx-lm, ssh and the operating system print when they fail, and what that means: data, by who prints it.

No reading of logs here: engine.runs.diagnosis does that.
"""

from __future__ import annotations

from typing import Final

from engine.runs.signatures import host, jaccl, launcher, metal, ring, training
from engine.runs.signatures.signature import ERRNO_WORDS as ERRNO_WORDS
from engine.runs.signatures.signature import Kind as Kind
from engine.runs.signatures.signature import Proof as Proof
from engine.runs.signatures.signature import Signature as Signature

SIGNATURES: Final[tuple[Signature, ...]] = (
    *launcher.SIGNATURES,
    *ring.SIGNATURES,
    *jaccl.SIGNATURES,
    *metal.SIGNATURES,
    *training.SIGNATURES,
    *host.SIGNATURES,
)
"""No text is known by two of them."""

BY_ID: Final = {signature.id: signature for signature in SIGNATURES}
