"""Validators of workers, checkpoints, gradients, performance and health.

Pure functions over plain values, re-exported by `engine` for other tools. Nothing here contacts a node, reads a clock
that was not passed in, or knows about runs; only the files of a checkpoint are read."""
