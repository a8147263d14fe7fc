"""The training plan: what a launch would do, with a reason for each choice. Nothing here contacts a node."""
