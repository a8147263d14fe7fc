"""Shared by both trainers: examples and their order, loop, checkpoint files, resumption, reports. No framework."""
