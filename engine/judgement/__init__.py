"""Verdicts on what a training run shows of itself: workers, checkpoints, gradients, performance, health.

Pure functions over plain values, callable by other tools too (re-exported by `engine`). Nothing in here asks a node,
reads a clock that was not passed in, or knows of a run; only a checkpoint's own files are read."""
