"""The README says what the code says: its key table is the action table's, its commands and pictures exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.conftest import FLIGHTDECK
from tui.actions import markdown

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_key_table_is_the_action_tables() -> None:
    table = README.split("<!-- keys: uv run python -m tui.actions -->")[1].split("<!-- /keys -->")[0]
    assert table.strip() == markdown().strip()


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"\]\((screenshots/[^)]+\.svg)\)", README)
    assert pictures
    assert [picture for picture in pictures if not (ROOT / picture).is_file()] == []


def test_every_command_named_is_one() -> None:
    known = subprocess.run([FLIGHTDECK, "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"flightdeck (demo|[a-z]+)\b", README.split("## Commands")[1].split("## The console")[0]))
    assert named
    assert [command for command in named if f"    {command} " not in known] == []
