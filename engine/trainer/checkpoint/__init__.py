"""Checkpoints of a training: everything that a run needs to go on as if it had never stopped, on disk completely or
not at all. What mlx-lm reads of a job (adapters, weights) is in `engine.trainer.saver`.

`files` has the bytes and the manifest of one checkpoint, `store` a folder of them, `locations` the folders and URLs of
a run. `periodic` and `emergency` decide when one is written, `resume` which one is read.
"""
