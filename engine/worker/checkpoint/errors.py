"""Why a checkpoint is not used."""

from __future__ import annotations


class Refused(ValueError):
    """It is torn, damaged, hostile or of another job: one line that says which, and what of it."""
