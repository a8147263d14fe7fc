"""Shared by head and nodes: messages, an attempt's files, exit codes, jobs. Standard library of Python 3.9 alone."""
