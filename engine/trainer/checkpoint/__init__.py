"""Checkpoints of a training: everything that a run needs to go on as if it had never stopped, on disk completely or not
at all. What mlx-lm reads of a job (adapters, weights) is in `engine.trainer.saver`."""
