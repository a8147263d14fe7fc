"""Runs on a node: agent, keeper and probes, with the standard library of Python 3.9 alone."""
