"""Preflight: one module per check, the runner over them, and the context they share. No check starts training or writes
into a run directory; one that cannot run reports why, and never passes silently."""
