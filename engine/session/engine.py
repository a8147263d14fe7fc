"""The door itself: everything that a face can ask, room by room."""

from __future__ import annotations

from engine.session.checks import Checks
from engine.session.configurations import Configurations
from engine.session.launches import Launches
from engine.session.plans import Plans


class Engine(Configurations, Plans, Checks, Launches):
    """One per process. Cheap to construct: reads nothing until it is asked."""
