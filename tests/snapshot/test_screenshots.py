"""Every screenshot looks as it did when a person last looked at it; `pytest --snapshot-update` after looking again."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.make_screenshots import SCREENSHOTS, file_name, picture
from tests.snapshot.screenshots import OTHERS, PICTURED, TERMINALS, Screenshot

SMALLEST, USUAL, WIDEST = TERMINALS
DOCUMENTS = "".join(
    path.read_text() for path in (SCREENSHOTS.parent / "README.md", *SCREENSHOTS.parent.glob("docs/*.md"))
)
README_PICTURES = [
    pytest.param(
        screenshot,
        size,
        id=f"{screenshot.name}-{size}",
        marks=() if size == SMALLEST or file_name(screenshot, size) in DOCUMENTS else pytest.mark.slow,
    )
    for screenshot in PICTURED
    for size in TERMINALS
]
Compare = Callable[..., bool]


@pytest.mark.parametrize("size", [SMALLEST, *(pytest.param(size, marks=pytest.mark.slow) for size in (USUAL, WIDEST))])
@pytest.mark.parametrize("screenshot", OTHERS, ids=lambda screenshot: screenshot.name)
def test_screenshot(screenshot: Screenshot, size: str, snap_compare: Compare, tmp_path: Path) -> None:
    app, reach = screenshot.open(tmp_path)
    assert snap_compare(app, terminal_size=TERMINALS[size], run_before=reach)


@pytest.mark.parametrize(("screenshot", "size"), README_PICTURES)
async def test_the_readmes_picture_is_what_the_console_draws(screenshot: Screenshot, size: str, tmp_path: Path) -> None:
    stored = SCREENSHOTS / file_name(screenshot, size)
    assert stored.exists(), "run: uv run python -m tests.snapshot.make_screenshots"
    drawn = await picture(screenshot, size, tmp_path, like=stored.read_text())
    stale = "stale; look, then run: uv run python -m tests.snapshot.make_screenshots"
    assert texts(stored.read_text()) == texts(drawn), stale
    assert stored.read_text() == drawn, stale


def texts(svg: str) -> list[str]:
    """What is written on a picture; that it differs is seen at a glance, where in the SVG it is not."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]


def test_no_picture_is_left_over() -> None:
    expected = {file_name(screenshot, size) for screenshot in PICTURED for size in TERMINALS}
    assert {path.name for path in SCREENSHOTS.glob("*.svg")} == expected


def test_pictures_name_no_place_of_the_machine_that_made_them(tmp_path: Path) -> None:
    text: Any = "".join(path.read_text() for path in SCREENSHOTS.glob("*.svg"))
    assert str(Path.home()) + "/" not in text and "/tmp/" not in text
