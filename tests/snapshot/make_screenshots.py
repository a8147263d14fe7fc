"""Writes the README's pictures, one SVG a view and size:

uv run python -m tests.snapshot.make_screenshots
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from tests.snapshot.scenes import PICTURED, TERMINALS, Scene

SCREENSHOTS: Final = Path(__file__).resolve().parents[2] / "screenshots"


def file_name(scene: Scene, size: str) -> str:
    return f"{scene.name}-{size}.svg"


async def picture(scene: Scene, size: str, home: Path) -> str:
    """The scene as SVG."""
    app, reach = scene.open(home)
    async with app.run_test(size=TERMINALS[size]) as pilot:
        await reach(pilot)
        return app.export_screenshot(title="flightdeck")


async def make() -> None:
    """Write all of them, and remove what is no scene any more."""
    SCREENSHOTS.mkdir(exist_ok=True)
    made = set()
    for scene in PICTURED:
        for size in TERMINALS:
            with tempfile.TemporaryDirectory() as home:
                path = SCREENSHOTS / file_name(scene, size)
                path.write_text(await picture(scene, size, Path(home)))
                made.add(path)
    for path in set(SCREENSHOTS.glob("*.svg")) - made:
        path.unlink()


if __name__ == "__main__":
    asyncio.run(make())
