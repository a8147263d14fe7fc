"""A calibration belongs to the job, the nodes and their versions that it was taken of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from engine.config.models import Config
from engine.models import NodeFacts, NvidiaGpu
from engine.plan.fingerprint import (
    changed_nodes,
    fingerprint,
    is_stale,
    latest_matching,
    node_fingerprints,
    scaling_fingerprint,
)
from tests.unit.plan.calibrations import TAKEN, calibration, config


def facts(node: str, **fields: Any) -> NodeFacts:
    seen = {"chip": "Apple M4 Max", "mlx": "0.32.4", **fields}
    return NodeFacts(node=node, host=f"{node}.local", probed_at=TAKEN, **seen)


SEEN = [facts("a"), facts("b")]


def job(deck: Config, **changes: Any) -> Config:
    own: dict[str, Any] = {
        name: changes.pop(name) for name in ("model", "strategy", "fine_tune_type", "command") if name in changes
    }
    return deck.model_copy(
        update={"job": deck.job.model_copy(update={**own, "mlx_lm": {**deck.job.mlx_lm, **changes}})}
    )


def test_a_step_of_local_is_measured_as_one_of_data() -> None:
    deck = config(["a", "b"])
    assert fingerprint(job(deck, strategy="local"), ()) == fingerprint(deck, ())
    assert fingerprint(job(deck, strategy="sharded"), ()) != fingerprint(deck, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"fine_tune_type": "full"},
        {"batch_size": 16},
        {"max_seq_length": 9},
        {"command": ("x",)},
        {"max_grad_norm": 1.0},
    ],
)
def test_what_changes_a_step_changes_it(changes: dict[str, Any]) -> None:
    deck = config(["a", "b"])
    assert fingerprint(job(deck, **changes), SEEN) != fingerprint(deck, SEEN)


@pytest.mark.parametrize("changes", [{"iters": 7}, {"learning_rate": 0.1}, {"save_every": 3}, {"seed": 4}])
def test_what_does_not_change_a_step_does_not(changes: dict[str, Any]) -> None:
    deck = config(["a", "b"])
    assert fingerprint(job(deck, **changes), SEEN) == fingerprint(deck, SEEN)


def test_nodes_and_their_versions_change_it_and_their_shares_do_not() -> None:
    deck = config(["a", "b"])
    known = fingerprint(deck, SEEN)
    assert fingerprint(deck, SEEN[::-1]) == known
    assert fingerprint(deck, [facts("a", disk_free_bytes=5), SEEN[1]]) == known
    assert fingerprint(config(["a", "b"], fixed={"a": 2.0}), SEEN) == known
    assert fingerprint(deck, [facts("a", mlx="0.32.5"), SEEN[1]]) != known
    assert fingerprint(deck, [facts("a", chip="Apple M3"), SEEN[1]]) != known
    assert fingerprint(deck, SEEN[:1]) != known
    assert fingerprint(config(["b", "a"]), SEEN) != known


@pytest.mark.parametrize(
    "changes",
    [{"torch": "2.13.1"}, {"nvidia_driver": "580.1"}, {"gpus": (NvidiaGpu(name="NVIDIA H200"),)}, {"mlx": "0.33.0"}],
)
def test_a_scaling_is_of_pytorch_and_the_gpus_too(changes: dict[str, Any]) -> None:
    mlx = config(["a", "b"])
    deck = mlx.model_copy(update={"job": mlx.job.model_copy(update={"framework": "torch"})})
    nvidia: dict[str, Any] = {"torch": "2.13.0", "nvidia_driver": "570.1", "gpus": (NvidiaGpu(name="NVIDIA H100"),)}
    known = scaling_fingerprint(deck, [facts("a", **nvidia), facts("b", **nvidia)])
    assert scaling_fingerprint(deck, iter([facts("b", **nvidia), facts("a", **nvidia)])) == known
    assert scaling_fingerprint(deck, [facts("a", **nvidia), facts("b", **{**nvidia, **changes})]) != known


def test_mlxs_build_and_its_gpus_are_a_nodes_own() -> None:
    deck = config(["a", "b"])
    h100, l4 = (NvidiaGpu(name=name) for name in ("NVIDIA H100", "NVIDIA L4"))
    on_cuda = facts("b", mlx_cuda="mlx-cuda-13 0.32.4", gpus=(h100,))
    digests = {
        fingerprint(deck, [SEEN[0], other])
        for other in (SEEN[1], on_cuda, on_cuda.model_copy(update={"gpus": (l4,)}), facts("b", gpus=(h100,)))
    }
    assert len(digests) == 3, "GPUs that MLX's CPU build does not use change nothing"


def test_changed_nodes_are_named_and_an_unreachable_node_is_unchanged() -> None:
    deck = config(["a", "b", "c"])
    taken = calibration({}, machines=node_fingerprints(deck, [*SEEN, facts("c")]))
    away = facts("c").model_copy(update={"problem": "no route to host"})
    assert changed_nodes(deck, [*SEEN, away], taken) == ()
    assert changed_nodes(deck, [SEEN[0], facts("b", mlx="0.33.0"), away], taken) == ("b",)
    assert changed_nodes(config(["a", "c"]), [SEEN[0], facts("c", chip="Apple M5")], taken) == ("c",)


def test_the_newest_calibration_of_the_job_and_nodes_is_used() -> None:
    deck = config(["a", "b"])
    wanted = fingerprint(deck, SEEN)
    old, new, other = (
        calibration({"a": 1.0, "b": 1.0}, fingerprint=known, taken_at=TAKEN + timedelta(days=days))
        for known, days in ((wanted, 0), (wanted, 1), ("other", 2))
    )
    assert latest_matching(deck, SEEN, [old, other, new]) == new
    assert latest_matching(deck, SEEN, [other]) is None


def test_age_has_a_limit_and_is_never_negative() -> None:
    deck, taken = config(["a"], max_age_days=2), calibration({"a": 1.0})
    assert not is_stale(deck, taken, TAKEN + timedelta(days=2))
    assert is_stale(deck, taken, TAKEN + timedelta(days=2, seconds=1))
    assert not is_stale(deck, taken, TAKEN - timedelta(days=9))
