"""Simulated histories of runs: virtual time, an in-memory network, simulated nodes, and the real supervisor's step."""
