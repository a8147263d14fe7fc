"""What follows from a failure, row by row: the traits of each reason and of each signature."""

from __future__ import annotations

import pytest

from engine.failures.signature import Signature
from engine.failures.signatures import BY_ID, SIGNATURES
from engine.models import Reason

REASONS = [
    (Reason.COMPLETED, "failure", "-----", None, None),
    (Reason.RANK_FAILED, "failure", "-ns--", None, None),
    (Reason.RANK_KILLED, "death", "ons--", None, None),
    (Reason.NODE_LOST, "loss", "o-su-", None, None),
    (Reason.HUNG, "hang", "ons--", None, "ring.all_sum_stuck"),
    (Reason.LAUNCH_FAILED, "failure to start", "--s--", None, None),
    (Reason.SEPARATE_GROUPS, "failure", "--s--", "the ranks would train apart from one another again", None),
    (Reason.PREFLIGHT_FAILED, "failure", "--s--", "preflight failed", None),
    (Reason.USER_ABORT, "failure", "--s--", "it was stopped as requested", None),
    (Reason.BUDGET_SPENT, "failure", "--s--", "its time was up", None),
    (Reason.OUT_OF_MEMORY, "death for lack of memory", "-ns-d", None, "memory.killed"),
    (Reason.DISK_FULL, "failure", "--s-d", "a restart makes no room on a full disk", "disk.full"),
    (Reason.DIVERGED, "failure", "-----", "the training has diverged, and would again", None),
    (
        Reason.CORRUPTED,
        "failure",
        "-----",
        "parameters differ between the ranks, and the reason must be found first",
        None,
    ),
    (Reason.SUPERVISOR_LOST, "failure", "--su-", "its supervisor was lost: nothing is started by surprise", None),
    (Reason.HEAD_SLEPT, "sleep of this machine", "o-s--", None, None),
]
"""Reason, its noun, its flags (from outside, nodes unchanged, state sound, end unseen, detailed), why it is never
restarted after, and the signature whose fix it has."""
TRANSIENT = {
    "c10d.clients_missing", "c10d.port_in_use", "c10d.store_unreachable", "elastic.rendezvous",
    "elastic.worker_killed", "gloo.connect", "jaccl.connect", "jaccl.wc", "memory.killed",
    "metal.interactivity", "metal.internal", "metal.timeout", "nccl.bind", "nccl.connect", "nccl.group_late",
    "ring.bind", "ring.connect", "ring.connect_retry", "ring.neighbor", "ssh.refused",
}  # fmt: skip
OWN_FAULTS = {
    "c10d.collectives_differ", "c10d.foreign_store", "c10d.no_environment", "c10d.not_initialised",
    "c10d.port_in_use", "cuda.assert", "cuda.device_ordinal", "cuda.ecc", "cuda.illegal_access",
    "cuda.mlx_cache", "cuda.mlx_compile", "cuda.mlx_library", "cuda.no_driver", "cuda.no_kernel",
    "cuda.no_library", "cuda.not_built", "cuda.old_driver", "cuda.oom", "ddp.models_differ", "ddp.ready_twice",
    "ddp.unused_parameters", "deepspeed.batch", "deepspeed.compile", "deepspeed.loss_scale",
    "deepspeed.world_size", "fsdp.mixed_tensors", "gloo.no_interface", "jaccl.gid", "jaccl.mr", "jaccl.nodev",
    "jaccl.pd", "jaccl.qp16", "jaccl.rtr22", "jaccl.rtr60", "jaccl.topology", "metal.interactivity",
    "metal.internal", "metal.malloc", "metal.oom", "metal.sinks", "nccl.bind", "nccl.invalid_usage", "nccl.mlx",
    "nccl.no_gpu", "nccl.no_interface", "nccl.not_built", "nccl.same_gpu", "nccl.system_error",
    "nccl.unsupported", "nccl.versions_differ", "ring.2gib", "ring.all_sum_stuck", "ring.bind", "ring.neighbor",
    "ring.no_sum_scatter", "ring.sum_scatter_stuck", "torch.cpu_oom", "torch.damaged_checkpoint",
    "torch.fp16_gradients", "torch.loader_killed", "torch.no_gradient", "torch.not_finite", "torch.old_system",
    "torch.other_build", "torch.shape_mismatch", "torch.shared_memory", "torch.weights_only",
}  # fmt: skip


def test_every_reason_and_every_signature_named_here_has_its_row() -> None:
    assert [row[0] for row in REASONS] == list(Reason)
    assert {*TRANSIENT, *OWN_FAULTS} <= BY_ID.keys()


@pytest.mark.parametrize(("reason", "noun", "flags", "never", "fix"), REASONS)
def test_the_traits_of_a_reason(reason: Reason, noun: str, flags: str, never: str | None, fix: str | None) -> None:
    traits = reason.traits
    held = (traits.from_outside, traits.nodes_unchanged, traits.state_sound, traits.end_unseen, traits.detailed)
    assert (traits.value, traits.noun, traits.never_restarted, traits.signature) == (reason, noun, never, fix)
    assert "".join(letter if has else "-" for letter, has in zip("onsud", held, strict=True)) == flags
    assert fix is None or fix in BY_ID


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_the_traits_of_a_signature(signature: Signature) -> None:
    expected = (signature.id in TRANSIENT, signature.id in OWN_FAULTS)
    assert (signature.transient, signature.own_fault) == expected
