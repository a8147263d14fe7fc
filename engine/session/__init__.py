"""The faces' only door into the engine: requests in, records and snapshots out.

Everything that costs start-up time (the store, asyncssh, the checks) is imported where it is first needed: a console
has to paint before it asks, and `flightdeck runs` needs none of it.
"""

from engine.runs.watch import RunWatch
from engine.session.engine import Engine
from engine.session.launches import run_id

__all__ = ["Engine", "RunWatch", "run_id"]
