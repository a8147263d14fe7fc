"""How the work of an update is divided over ranks: one module per strategy, each a `base.Strategy`. Iterations, files,
signals and start-up belong to the loop and the entry point."""
