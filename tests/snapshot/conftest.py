"""The consoles of the pictures are opened as those of the other tests are."""

from tests.tui.conftest import untidy

__all__ = ["untidy"]
