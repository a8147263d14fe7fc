"""The runs that this machine knows and the last facts of its nodes, in one TinyDB file below the state directory, and
what keeps that file whole. Never metrics, never logs. Nothing here knows of journals or run directories."""
