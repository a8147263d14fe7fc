"""Preflight: what must hold before a run is launched. One module per check, the runner over them, and the context
they share.

No check starts training or writes into a run directory. A check that cannot run reports why; it never passes
silently."""
