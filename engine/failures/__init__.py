"""Failures: the texts that programs print when they fail, and what they mean for a run. Nothing here reads a file."""
