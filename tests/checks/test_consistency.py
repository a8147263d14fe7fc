"""worker_consistency compares the workers with this machine and names those that differ."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checks import consistency as check
from engine.checks.consistency import Agreement, Decision, agreement, decide
from engine.config.models import Config
from engine.models import CheckStatus
from engine.node.probes.model_files import file_hash
from engine.plan.preflight import command_files
from tests.checks.conftest import run_check, run_fix

pytestmark = pytest.mark.usefixtures("shared_agent")

HASHES = st.sampled_from(["a", "b", "c", None])
HELD = st.fixed_dictionaries({"script": HASHES, "model": HASHES})
WORKERS = st.lists(HELD, min_size=1, max_size=24).map(
    lambda held: {f"w{number}": hashes for number, hashes in enumerate(held)}
)
HEADS: st.SearchStrategy[dict[str, str | None]] = st.one_of(
    st.just({}), st.fixed_dictionaries({"script": HASHES}), HELD
)


def of(*scripts: str, head: str | None = None) -> Agreement:
    workers = {f"w{number}": {"script": script} for number, script in enumerate(scripts)}
    return agreement(workers, {} if head is None else {"script": head})


@given(WORKERS, HEADS)
def test_every_worker_is_on_one_side_and_the_agreeing_hold_the_reference(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None]
) -> None:
    found = agreement(workers, head)
    assert sorted((*found.agreeing, *found.divergent)) == sorted(workers)
    assert found.ratio == len(found.agreeing) / len(workers)
    if found.reference is None:
        assert found.agreeing == ()
        return
    for name, held in workers.items():
        assert (held == found.reference) == (name in found.agreeing)
    assert {item: found.reference[item] for item in head} == head


@given(WORKERS)
def test_without_a_head_the_reference_is_what_most_hold_and_never_one_of_two_halves(
    workers: dict[str, dict[str, str | None]],
) -> None:
    found = agreement(workers, {})
    counts = Counter((held["script"], held["model"]) for held in workers.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        assert found.reference is None
    else:
        assert found.reference is not None
        assert tuple(found.reference[item] for item in ("script", "model")) == counts[0][0]
        assert len(found.agreeing) == counts[0][1]


@given(WORKERS, HEADS, st.floats(0.01, 1.0), st.booleans())
def test_more_than_half_divergent_always_blocks(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None], threshold: float, exclude: bool
) -> None:
    found = agreement(workers, head)
    decision = decide(found, threshold, exclude_divergent=exclude)
    if not found.divergent:
        assert decision == "agree"
    elif len(found.divergent) > len(workers) / 2 or found.reference is None:
        assert decision == "block"
    elif exclude:
        assert decision == "exclude"
    else:
        assert decision == ("tolerate" if found.ratio >= threshold else "block")


@given(WORKERS, HEADS, st.randoms())
def test_the_order_of_the_workers_changes_nothing(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None], shuffled: object
) -> None:
    names = list(workers)
    shuffled.shuffle(names)  # type: ignore[attr-defined]
    one, other = agreement(workers, head), agreement({name: workers[name] for name in names}, head)
    assert (one.reference, set(one.agreeing)) == (other.reference, set(other.agreeing))


@pytest.mark.parametrize(("workers", "decision"), [(20, "tolerate"), (19, "block"), (40, "tolerate")])
def test_the_threshold_is_inclusive(workers: int, decision: Decision) -> None:
    found = of("b", *["a"] * (workers - 1), head="a")
    assert decide(found, 0.95, exclude_divergent=False) is decision


def test_the_head_is_right_also_against_the_majority() -> None:
    found = of("b", "b", "a", head="a")
    assert (found.source, found.agreeing) == ("head", ("w2",))
    assert decide(found, 0.3, exclude_divergent=True) == "block"


def test_of_two_workers_the_one_that_differs_from_the_head_may_be_left_out() -> None:
    assert decide(of("a", "b", head="a"), 0.95, exclude_divergent=True) == "exclude"
    assert decide(of("a", "b"), 0.95, exclude_divergent=True) == "block"


def test_no_workers_are_an_error() -> None:
    with pytest.raises(ValueError, match="no workers"):
        agreement({}, {"script": "a"})


@pytest.fixture
def script(config: Config, tmp_path: Path) -> Config:
    """A command of two files in two workdirs."""
    nodes = []
    for node in config.nodes:
        folder = tmp_path / node.name
        folder.mkdir()
        (folder / "train.py").write_text("print(1)\n")
        (folder / "lora.yaml").write_text("iters: 1\n")
        nodes.append(node.model_copy(update={"workdir": str(folder)}))
    command = ("python", "train.py", "--config", "{workdir}/lora.yaml", "--out", "result.txt", "rank{rank}.json")
    job = config.job.model_copy(update={"command": command})
    return config.model_copy(update={"nodes": tuple(nodes), "job": job})


async def test_workers_of_one_content_agree(config: Config, script: Config) -> None:
    for each, items in ((config, 4), (script, 3)):
        result = await run_check(check.run, each)
        assert (result.status, result.summary) == (
            CheckStatus.PASS,
            f"2 nodes agree with this machine on {items} items",
        ), result
        assert result.detail is not None and result.detail.kind == "worker_consistency"
        assert (result.detail.agreement, result.detail.reference) == (1.0, "head")


async def test_another_script_is_named_with_both_hashes_and_its_fix_works(script: Config) -> None:
    theirs = Path(script.nodes[1].workdir) / "train.py"
    theirs.write_text("print(2)\n")
    ours, other = file_hash(Path(script.nodes[0].workdir) / "train.py"), file_hash(theirs)
    result = await run_check(check.run, script)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert ours is not None and other is not None
    assert f"node1: train.py is {other[:12]}, {ours[:12]} on this machine" in result.summary
    assert "1 of 2 agree, 0.50 against 0.95" in result.summary
    await run_fix(result.fix_command)
    assert (await run_check(check.run, script)).status is CheckStatus.PASS
    assert (theirs.parent / f"train.py.aside-{other[:12]}").read_text() == "print(2)\n"


async def test_a_missing_settings_file_differs_too(script: Config) -> None:
    (Path(script.nodes[1].workdir) / "lora.yaml").unlink()
    result = await run_check(check.run, script)
    assert "lora.yaml is missing" in result.summary
    await run_fix(result.fix_command)
    assert (await run_check(check.run, script)).status is CheckStatus.PASS


async def test_another_tokenizer_is_fixed_by_copying_the_model(config: Config, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").write_text(json.dumps({"other": 1}))
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"model": str(copy)}))
    two = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, two)
    assert "node1: model tokenizer.json is " in result.summary
    await run_fix(result.fix_command)
    assert (await run_check(check.run, two)).status is CheckStatus.PASS
    assert [json.loads(file.read_text()) for file in copy.glob("tokenizer.json.aside-*")] == [{"other": 1}]


async def test_a_divergent_minority_is_left_out_when_the_configuration_says_so(script: Config) -> None:
    (Path(script.nodes[1].workdir) / "train.py").write_text("print(2)\n")
    settings = script.preflight.model_copy(update={"exclude_divergent": True})
    result = await run_check(check.run, script.model_copy(update={"preflight": settings}))
    assert (result.status, result.excludes) == (CheckStatus.WARN, ("node1",))
    assert "left out of the launch: node1" in result.summary


def test_outputs_and_files_of_a_rank_are_not_compared(script: Config) -> None:
    assert command_files(script) == ["train.py", "{workdir}/lora.yaml"]


def test_one_worker_has_nobody_to_agree_with(config: Config) -> None:
    one = config.model_copy(update={"nodes": config.nodes[:1]})
    assert check.CHECK.not_applicable(one) == "one node: nothing to compare"
    off = config.preflight.model_copy(update={"consistency": False})
    assert check.CHECK.switched_off(config.model_copy(update={"preflight": off})) is not None


def test_what_this_machine_lacks_is_known_only_where_it_has_the_rest_of_the_model() -> None:
    workers = {"a": {"model vocab.json": "1", "model config.json": "2", "train.py": "3"}}
    assert check.head_reference({"model config.json": "2", "train.py": None}, workers) == {
        "model config.json": "2",
        "model vocab.json": None,
    }
    assert check.head_reference({"worker": "4"}, workers) == {"worker": "4"}
