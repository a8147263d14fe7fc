"""How an attempt gets onto its nodes: ports, hostfile, the staged worker, start.sh, mlx.launch's process.

Nothing here watches, judges or ends a run (engine.supervision), and nothing here imports mlx.
"""
