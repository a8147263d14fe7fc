"""A file that there is gets other nodes and settings, and keeps everything else."""

from __future__ import annotations

import tomllib

import pytest

from engine.config.draft import DraftNode, draft
from engine.config.redraft import redraft
from engine.errors import InputError

ULTRA = DraftNode("ultra", "ana@ultra.local", "~/new/bin/python")
MAX = DraftNode("max", "max.local", "~/mlx/bin/python", about="Apple M4")
BEFORE = """\
# my cluster
[cluster]
name = "studio"  # ours

[[node]]
name = "one"
ssh = "ana@ultra.local"
python = "~/old/bin/python"  # NOT VERIFIED
processes = 2  # two GPUs

[[node]]
name = "two"
ssh = "bea@gone.local"
python = "~/p"

# what is trained
[job]
model = "~/m"
epochs = 2  # enough
seed = 7

[recovery]
max_restarts = 1  # once
"""


def test_nodes_keep_their_names_and_keys_and_other_tables_and_comments_stay() -> None:
    after = redraft(BEFORE, [MAX, ULTRA], {"model": "~/other", "iters": 50, "data.valid": 0.1})
    document = tomllib.loads(after)
    assert document["node"] == [
        {"name": "max", "ssh": "max.local", "python": "~/mlx/bin/python"},
        {"name": "one", "ssh": "ana@ultra.local", "python": "~/new/bin/python", "processes": 2},
    ]
    assert document["job"] == {"model": "~/other", "seed": 7, "iters": 50}
    assert document["recovery"] == {"max_restarts": 1} and document["data"] == {"valid": 0.1}
    kept = ("# my cluster", "# ours", "# two GPUs", "# what is trained", "# once")
    assert [comment for comment in kept if comment not in after] == []
    assert "gone.local" not in after and "NOT VERIFIED" not in after


def test_a_guess_that_was_replaced_is_no_longer_said_to_be_one() -> None:
    guessed = draft([DraftNode("ultra", "ana@ultra.local")])
    assert guessed.count("NOT VERIFIED") == 1 and guessed.count("CHANGE ME") == 2
    after = redraft(guessed, [ULTRA], {"model": "~/m", "data": "~/d"})
    assert "NOT VERIFIED" not in after and "CHANGE ME" not in after


def test_the_same_again_changes_nothing() -> None:
    once = redraft(BEFORE, [MAX, ULTRA], {"iters": 50})
    assert redraft(once, [MAX, ULTRA], {"iters": 50}) == once


def test_two_ranks_of_one_host_and_a_file_without_nodes_or_job() -> None:
    twice = redraft('[cluster]\nname = "a"', [ULTRA, ULTRA], {"iters": 5})
    assert [node["name"] for node in tomllib.loads(twice)["node"]] == ["ultra", "ultra-2"]
    assert len(tomllib.loads(redraft(twice, [ULTRA], {}))["node"]) == 1


@pytest.mark.parametrize("text", ["a = [", "node = 3", "job = { iters = 3 }\n", '["node"]'])
def test_a_form_that_is_only_for_a_person_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="the file cannot be changed"):
        redraft(text, [ULTRA], {"iters": 5})


def test_a_comment_may_have_the_line_ends_of_other_languages() -> None:
    odd = BEFORE.replace("# ours", "# ours\u2028and\x85yours")
    text = redraft(odd, [ULTRA], {"seed": 8})
    assert "# ours\u2028and\x85yours\n" in text and "seed = 8\n" in text
