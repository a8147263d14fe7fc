"""The failure signatures of MLX, mlx-lm, ssh and the operating system, and what they mean: data, by who prints it.

No reading of logs here: engine.run.diagnosis does that.
"""

from __future__ import annotations

from typing import Final

from engine.run.signatures import backends, programs
from engine.run.signatures.signature import ERRNO_NAMES as ERRNO_NAMES
from engine.run.signatures.signature import Provenance as Provenance
from engine.run.signatures.signature import Signature as Signature
from engine.run.signatures.signature import SignatureKind as SignatureKind

SIGNATURES: Final[tuple[Signature, ...]] = (
    *programs.LAUNCHER_SIGNATURES,
    *backends.RING_SIGNATURES,
    *backends.JACCL_SIGNATURES,
    *backends.METAL_SIGNATURES,
    *programs.TRAINING_SIGNATURES,
    *programs.HOST_SIGNATURES,
)
"""No text is known by two of them."""

BY_ID: Final = {signature.id: signature for signature in SIGNATURES}
