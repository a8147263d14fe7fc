"""Memory of a training step on one rank, from the model's config.json and the job: no weights, no node, no MLX."""
