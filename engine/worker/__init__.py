"""What runs on the nodes: the rank's keeper (standard library alone) and the trainer (mlx and mlx_lm).

Nothing here imports the rest of the engine, since this folder alone is staged on a node as a bundle; the engine may
import `wire` and `processes` from here, and nothing else."""
