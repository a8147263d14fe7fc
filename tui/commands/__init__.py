"""What each `flightdeck` command does: calls the session, prints plain lines or one JSON document.

No textual and no rich in here, and no logic of the engine's.
"""
