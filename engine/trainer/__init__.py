"""The MLX trainer, and what measures and checks it on the nodes."""

import os

# MLX's CUDA build raises an error when a cache of graphs or plans has missed more often than twice its size in all the
# life of the process, as a long training with batches of many lengths does. Read when MLX is imported.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
