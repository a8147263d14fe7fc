"""One detached process per run: it launches, watches, judges, ends and adopts; nobody else writes a run's state.

Nothing here shows anything to a person, trains, or imports mlx; what a run looks like is read in engine.runs.
"""
