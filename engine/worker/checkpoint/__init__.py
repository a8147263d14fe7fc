"""Checkpoints of the training: everything that a run needs to go on as if it had never stopped, on a disk, whole or not
at all. What mlx-lm reads of a job (adapters, weights) is not here but in `worker.checkpoints`."""
