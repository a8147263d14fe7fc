"""How the work of an update is divided over ranks: one module per strategy, each a `base.Strategy`.

Strategies compute and communicate; iterations, files, signals and start-up belong to the loop and the entry point.
"""
