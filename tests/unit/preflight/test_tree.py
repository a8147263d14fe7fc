"""Trees compared: what differs, what is missing, what a copy would put a folder in the place of."""

from __future__ import annotations

from engine.preflight.tree import Difference


def test_a_link_where_the_reference_has_a_folder_is_in_the_way() -> None:
    found = Difference(missing=("data/a/x.txt", "data/y.txt", "new.txt"), own=("data", "data2", "notes.txt"))
    assert found.in_the_way == ("data",)
    assert Difference(missing=("data.txt",), own=("data",)).in_the_way == ()
    assert Difference(own=("data",)).in_the_way == ()
