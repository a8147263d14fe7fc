"""What the user wants: flightdeck.toml and mlx-lm's YAML read into validated, frozen models, with all faults at once.
Nothing here contacts a node, starts a process, or looks into a model; that a path exists is preflight's to say."""
