"""resume: a run that has ended goes on from the state that it saved."""

from __future__ import annotations

import argparse
import asyncio

from engine.session import Engine
from tui.commands.flight import follow_launch


def resume(options: argparse.Namespace, engine: Engine) -> int:
    """Take a run up again; without --follow, leave once preflight has let it through."""
    return follow_launch(options, engine, lambda: asyncio.run(engine.resume(options.run)))
