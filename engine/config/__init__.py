"""Reads flightdeck.toml, mlx-lm's YAML and hostfiles into validated, frozen models, and reports all faults at once.
Nothing here contacts a node, starts a process or opens a model; preflight checks whether paths exist."""
