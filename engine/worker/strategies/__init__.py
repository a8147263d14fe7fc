"""How the work of a step is divided over ranks: one module per strategy, each with one entry the trainer calls.

Strategies compute and communicate; files, signals and start-up belong to the trainer around them."""
