"""The state directory: runs and calibrations in TinyDB, locked and written atomically; and where each file lies."""
