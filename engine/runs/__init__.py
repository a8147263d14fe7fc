"""One run's directory on the head: journal, mirrors, line indices, metrics, and what a face reads of them.

Nothing here starts a process or decides how a run ends; only the supervisor writes what is kept here.
"""
