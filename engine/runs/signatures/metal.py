"""What Metal, and macOS around the GPU, print. None of it can be reproduced without a Mac."""

from __future__ import annotations

from typing import Final

from engine.models import Reason
from engine.runs.signatures.signature import Kind, Proof, Signature

_FAILED: Final = "[METAL] Command buffer execution failed: "

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "metal.timeout",
        r"kIOGPUCommandBufferCallbackErrorTimeout",
        "the GPU waited some seconds inside one command buffer, as it does for a slower or dead peer, and was stopped",
        "look for a rank that went first or is much slower, and give that one a smaller share; a program of your own "
        "must evaluate first and communicate on the CPU stream",
        f"{_FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        "ml-explore/mlx-examples#1185, ml-explore/mlx-examples#1200, exo-explore/exo#1620",
        Proof.REPORTED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "metal.interactivity",
        r"kIOGPUCommandBufferCallbackErrorImpactingInteractivity",
        "macOS stopped the GPU's work because it held up the display",
        "use a smaller batch or shorter sequences, and let that Mac's display sleep",
        f"{_FAILED}Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        "ml-explore/mlx#3267",
        Proof.REPORTED,
    ),
    Signature(
        "metal.internal",
        r"Internal Error \(0000000e",
        "the GPU's driver failed inside itself",
        "use a smaller batch or shorter sequences; if it comes back, restart that Mac",
        f"{_FAILED}Internal Error (0000000e:Internal Error)",
        "ml-explore/mlx#1226, ml-explore/mlx#1231",
        Proof.REPORTED,
    ),
    Signature(
        "metal.oom",
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory \(00000008",
        "the GPU's memory did not suffice",
        "use a smaller batch or shorter sequences, grad_checkpoint, or fewer layers; "
        "`iogpu.wired_limit_mb` sets how much of the memory the GPU may have",
        f"{_FAILED}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "ml-explore/mlx-lm#236",
        Proof.REPORTED,
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "metal.malloc",
        r"\[(?:metal::)?malloc\] (?:Unable to allocate|Attempting to allocate|Resource limit)",
        "one array was larger than Metal gives out at once, or there were too many of them",
        "use shorter sequences or a smaller batch",
        "RuntimeError: [metal::malloc] Resource limit (499000) exceeded.",
        "mlx/backend/metal/allocator.cpp",
        Proof.SOURCE,
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "os.watchdog_panic",
        r"no (?:successful )?checkins from (?:watchdogd|WindowServer)",
        "macOS restarted the Mac: long work on the GPU left its watchdog without a sign of life",
        "use a smaller batch or shorter sequences, and let that Mac's display sleep",
        "panic: watchdog timeout: no checkins from WindowServer in 120 seconds",
        "ml-explore/mlx#3267",
        Proof.REPORTED,
    ),
    Signature(
        "os.iogpu_panic",
        r"completeMemory\(\) prepare count underflow",
        "macOS stopped with a fault in its GPU driver, as happens when memory is nearly used up",
        "bring macOS up to date, and leave more memory free: a smaller batch, no other large programs",
        "panic: IOGPUMemory::completeMemory() prepare count underflow",
        "ml-explore/mlx#3186",
        Proof.REPORTED,
    ),
)
