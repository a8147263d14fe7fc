"""The training plan: what a launch would do, derived from facts, configuration and calibration, with a reason for each
choice. Nothing here contacts a node."""
