"""A rank whose sum never ends: NCCL does not notice that a peer is gone, and its kernel waits for it for ever. One
machine with one GPU forms no group of NCCL, so a kernel of our own that never ends stands for the sum."""

from __future__ import annotations

from tests.gpu.mlx_models import ask
from tests.gpu.part import Visit


def hang(visit: Visit) -> None:
    """Another thread saves the state, as the head asks for it when a peer is lost, and ends the process."""
    request = {"folder": str(visit.scratch), "device": visit.device}
    asked = ask(visit, "hang", request, limit_s=60.0 if visit.dry else 25.0)
    saved = ask(visit, "saved", request) if asked.failure is None else asked
    ok = asked.failure is None and saved.failure is None and saved.answers == [{"same": True}]
    note = asked.failure or saved.failure or f"the process ended after {asked.completed.seconds:.1f} s"
    what = "a state is saved beside a kernel that never ends"
    visit.result(what, "yes" if ok else "no", target="yes", ok=ok, note=note)
