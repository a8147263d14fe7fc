"""One run: its supervisor, journal, attempts, recovery and verdict; its logs and metrics, and how both are read."""
