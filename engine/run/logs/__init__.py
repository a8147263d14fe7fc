"""A run's logs: mirrored from the nodes, indexed by line, searched and read."""
