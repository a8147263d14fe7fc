"""Measures the training step on each node alone, and the links between them; what follows is `engine.plan`'s."""
