"""The training plan: what a launch would do, section by section, and why. Nothing here contacts a node."""
