"""The consoles of the pictures are opened as those of the other tests are."""

from tests.tui.conftest import no_gc_scheduler, no_rule_is_parsed_twice

__all__ = ["no_gc_scheduler", "no_rule_is_parsed_twice"]
