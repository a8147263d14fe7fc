"""Writes the README's pictures, one SVG a view and size:

uv run python -m tests.snapshot.make_screenshots
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.snapshot.screenshots import PICTURED, TERMINALS, Screenshot

PATIENCE_S: Final = 15.0
SCREENSHOTS: Final = Path(__file__).resolve().parents[2] / "screenshots"


def file_name(screenshot: Screenshot, size: str) -> str:
    return f"{screenshot.name}-{size}.svg"


async def picture(screenshot: Screenshot, size: str, home: Path, like: str | None = None) -> str:
    """The screenshot as SVG; what should look `like` a stored one has PATIENCE_S to become so."""
    app, reach = screenshot.open(home)
    async with app.run_test(size=TERMINALS[size]) as pilot:
        await reach(pilot)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            drawn = app.export_screenshot(title="flightdeck")
            if like in (None, drawn) or time.monotonic() > deadline:
                return drawn
            await pilot.pause(0.1)


async def make() -> None:
    """Write all of them, and remove what is no screenshot any more."""
    SCREENSHOTS.mkdir(exist_ok=True)
    made = set()
    for screenshot in PICTURED:
        for size in TERMINALS:
            with tempfile.TemporaryDirectory() as home:
                path = SCREENSHOTS / file_name(screenshot, size)
                path.write_text(await picture(screenshot, size, Path(home)))
                made.add(path)
    for path in set(SCREENSHOTS.glob("*.svg")) - made:
        path.unlink()


if __name__ == "__main__":
    asyncio.run(make())
