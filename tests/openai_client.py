"""OpenAI's own client, which takes a second to import: only the tests that use it wait for that."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def openai() -> Any:
    return import_module("openai")
