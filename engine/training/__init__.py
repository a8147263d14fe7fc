"""Shared by both trainers: examples and their order, loop, resumption, checkpoint files, reports. No framework."""
