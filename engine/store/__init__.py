"""The runs that this machine knows, in one TinyDB file below the state directory, and what keeps that file whole.
Only run records live here: never metrics, never logs. Nothing here knows of journals or run directories."""
