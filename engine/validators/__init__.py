"""Workers, checkpoints, gradients, performance and health: verdicts from plain values, which `engine` exports too."""
