"""What only a machine with an NVIDIA GPU can show, in one command: see README.md."""
