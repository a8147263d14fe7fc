"""Validators of workers, checkpoints, gradients, performance and health: pure functions over plain values, which
`engine` exports for other tools. They know nothing of runs, and read only the files of a checkpoint."""
