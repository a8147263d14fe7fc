"""What an attempt passes to its nodes, and that it survives the journal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine.cluster.staging import HostLayout
from engine.config.models import CheckpointConfig, ClusterConfig, Config, JobConfig, NodeConfig
from engine.measurements import Division
from engine.plan import network
from engine.protocol.attempt import AttemptSpec
from engine.run.attempt import attempt_spec, keep_secrets, new_attempt
from engine.run.events import Attempt, StateSaved
from engine.run.history import fold
from engine.run.run_plan import RunPlan
from engine.store.layout import LAUNCHER_SOURCE, RunDir
from tests.unit.launch.host_layouts import configured_network, local_layout
from tests.unit.plan.clusters import calibration
from tests.unit.run.run_maker import history_before, made_decisions, planned_attempt

TRAINING = JobConfig(name="t", model="/m", data="/d", mlx_lm={"iters": 5, "model": "old"}, env={"A": "1"})


def plan(job: JobConfig = TRAINING, **node: Any) -> RunPlan:
    nodes = (
        NodeConfig(name="left", python=sys.executable, workdir="/w", share=3.0, model="/other"),
        NodeConfig(**{"name": "right", "python": sys.executable, "workdir": "/w", **node}),
    )
    config = Config(cluster=ClusterConfig(), nodes=nodes, job=job)
    return RunPlan(nonce="n", config=config, run_id="r", created_at=datetime(2026, 1, 1, tzinfo=UTC))


def attempt(directory: Path, of: RunPlan) -> Attempt:
    return planned_attempt(RunDir(directory), of, [local_layout(directory / "node", 2)], 2, "nonce")


def spec_of(
    of: RunPlan, made: Attempt, environment: Mapping[str, str] = MappingProxyType({}), **decided: Any
) -> AttemptSpec:
    return attempt_spec(of, made, made_decisions(of, **decided), environment)


def test_an_adopter_reports_to_wandb_as_the_launch_did(tmp_path: Path) -> None:
    launched = {"WANDB_API_KEY": "key", "WANDB_MODE": "offline", "PATH": "/bin"}
    keep_secrets(RunDir(tmp_path), launched, adopted=False)
    adopter = {"PATH": "/usr/bin", "WANDB_MODE": "online"}
    keep_secrets(RunDir(tmp_path), adopter, adopted=True)
    assert adopter == {**launched, "PATH": "/usr/bin"}


def test_a_training_takes_the_jobs_own_keys_over_the_yamls(tmp_path: Path) -> None:
    spec = spec_of(plan(), attempt(tmp_path, plan()))
    assert spec.job == {
        "iters": 5,
        "model": "/m",
        "data": "/d",
        "fine_tune_type": "lora",
        "strategy": "data",
        "chunking": True,
        "chunk_size": 50_000,
    }
    assert spec.command is None
    assert (spec.attempt, spec.nonce, spec.world_size, spec.backend) == (2, "nonce.2", 2, "ring")


@pytest.mark.parametrize(("strategy", "restarts"), [("data", 0), ("sharded", 0), ("local", 3)])
def test_keepers_restart_ranks_only_where_the_others_go_on_without_them(
    tmp_path: Path, strategy: str, restarts: int
) -> None:
    of = plan(TRAINING.model_copy(update={"strategy": strategy}))
    assert [rank.restarts for rank in spec_of(of, attempt(tmp_path, of)).ranks] == [0, restarts]


def test_the_first_rank_on_a_host_puts_its_display_to_sleep(tmp_path: Path) -> None:
    of = plan(TRAINING.model_copy(update={"display_sleep": True}))
    layouts = attempt(tmp_path, of).layouts
    first = [rank in (layout.ranks[0] for layout in layouts) for rank in range(2)]
    assert [rank.display_sleep for rank in spec_of(of, attempt(tmp_path, of)).ranks] == first
    assert not any(rank.display_sleep for rank in spec_of(plan(), attempt(tmp_path, plan())).ranks)


def test_how_the_state_is_kept_is_passed_on(tmp_path: Path) -> None:
    """A path is the node's own; an address is everybody's."""
    for named, there in (("/mnt/nas", "/mnt/nas"), ("states", "/w/states"), ("s3://b/x", "s3://b/x"), (None, None)):
        checkpoint = CheckpointConfig(every=7, keep=2, compression="gzip", destination=named)
        configured = plan(ssh="ana@10.0.0.2")
        config = configured.config.model_copy(update={"checkpoint": checkpoint})
        spec = spec_of(configured.model_copy(update={"config": config}), attempt(tmp_path, configured))
        assert (spec.checkpoint_every, spec.checkpoint_keep, spec.checkpoint_compression) == (7, 2, "gzip")
        assert spec.ranks[1].checkpoint_folder == there


@pytest.mark.parametrize("split", ["0-8,8-36", None])
def test_a_pipelines_layers_are_those_that_were_decided(tmp_path: Path, split: str | None) -> None:
    of = plan(TRAINING.model_copy(update={"strategy": "pipeline"}))
    job = spec_of(of, attempt(tmp_path, of), layer_split=split).job
    assert job is not None and job.get("layer_split") == split


def test_the_validating_ranks_are_those_that_were_decided(tmp_path: Path) -> None:
    ranks = spec_of(plan(), attempt(tmp_path, plan()), validators=("right",)).ranks
    assert [rank.validates for rank in ranks] == [False, True]


def test_each_rank_has_its_nodes_paths_and_share(tmp_path: Path) -> None:
    division = Division(parts={"left": 0.75, "right": 0.25}, source="fixed", reason="set")
    left, right = spec_of(plan(), attempt(tmp_path, plan()), division=division).ranks
    assert (left.model, left.data, left.share) == ("/other", "/d", 0.75)
    assert (right.model, right.data, right.share) == ("/m", "/d", 0.25)


def test_the_ranks_are_offline_unless_the_job_overrides_it(tmp_path: Path) -> None:
    assert spec_of(plan(), attempt(tmp_path, plan())).env == {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "A": "1",
    }
    online = plan(TRAINING.model_copy(update={"env": {"HF_HUB_OFFLINE": "0"}}))
    assert spec_of(online, attempt(tmp_path, online)).env["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize("infiniband", [True, False])
def test_nccl_gets_the_plans_variables_unless_the_job_overrides_them(tmp_path: Path, *, infiniband: bool) -> None:
    own = plan(TRAINING.model_copy(update={"env": {"NCCL_DEBUG": "WARN"}}))
    nccl = configured_network(own.config.nodes, "nccl").model_copy(update={"infiniband": infiniband})
    made = attempt(tmp_path, own)
    found = {name: text for name, text in spec_of(own, made, network=nccl).env.items() if name.startswith("NCCL_")}
    assert found == network.nccl_environment(infiniband=infiniband, gradient_bytes=None) | {"NCCL_DEBUG": "WARN"}
    small = own.model_copy(update={"calibration": calibration({"left": 1.0}, gradient_bytes=1000)})
    assert spec_of(small, made, network=nccl).env.get("NCCL_BUFFSIZE") == (str(4 << 20) if infiniband else None)


def test_a_command_is_no_job(tmp_path: Path) -> None:
    command = plan(JobConfig(name="c", command=("python", "x.py"), mlx_lm={"iters": 5}))
    spec = spec_of(command, attempt(tmp_path, command))
    assert (spec.job, spec.command) == (None, ["python", "x.py"])


def test_it_survives_the_journal_and_begins_where_the_heads_files_end(tmp_path: Path) -> None:
    RunDir(tmp_path).log(1).write_bytes(b"earlier")
    RunDir(tmp_path).events(0).write_bytes(b"{}\n")
    made = attempt(tmp_path, plan())
    assert made.log_bases == {0: 0, 1: 7, LAUNCHER_SOURCE: 0}
    assert made.event_bases == {0: 3, 1: 0}
    assert Attempt.model_validate_json(made.model_dump_json()) == made


def test_paths_are_absolute_on_the_node_of_their_rank(tmp_path: Path) -> None:
    job = TRAINING.model_copy(update={"mlx_lm": {"adapter_path": "out/a", "resume_adapter_file": "~/last"}})
    remote = {"ssh": "ana@h", "python": "~/py", "workdir": "~/work", "model": "~/m", "data": "/d"}
    of = plan(job, **remote)
    layouts = [
        HostLayout("127.0.0.1", (0,), "/home/head", str(tmp_path), "/b", "/py"),
        HostLayout("ana@h", (1,), "/Users/ana", "/Users/ana/.flightdeck", "/b", "/Users/ana/py"),
    ]
    of = of.model_copy(update={"config": of.config.model_copy(update={"file": Path("/conf/flightdeck.toml")})})
    made = planned_attempt(RunDir(tmp_path), of, layouts, 1, "nonce")
    left, right = spec_of(of, made).ranks
    assert (right.python, right.workdir, right.model, right.data) == (
        *("/Users/ana/py", "/Users/ana/work", "/Users/ana/m", "/d"),
    )
    assert (left.adapter_path, right.adapter_path) == ("/conf/out/a", "/Users/ana/work/out/a")
    assert right.resume_adapter_file == "/Users/ana/last"
    assert str(made.files("r", 1).spec) == "/Users/ana/.flightdeck/runs/r/attempts/1/spec.json"
    assert Attempt.model_validate_json(made.model_dump_json()) == made


def test_secrets_of_the_head_go_into_the_spec_and_nowhere_else(tmp_path: Path) -> None:
    environment = {"HF_TOKEN": "hf_1", "WANDB_API_KEY": "w_1", "HOME": "/root"}
    made = attempt(tmp_path, plan())
    env = spec_of(plan(), made, environment).env
    assert {name: env.get(name) for name in environment} == {"HF_TOKEN": "hf_1", "WANDB_API_KEY": "w_1", "HOME": None}
    assert "hf_1" not in made.model_dump_json()
    mine = plan(TRAINING.model_copy(update={"env": {"HF_TOKEN": "hf_of_the_job"}}))
    assert spec_of(mine, made, environment).env["HF_TOKEN"] == "hf_of_the_job"


def test_why_a_state_is_needed_is_passed_to_the_trainers_also_after_an_adoption(tmp_path: Path) -> None:
    made = attempt(tmp_path, plan()).model_copy(update={"needs_state": "x"})
    assert spec_of(plan(), Attempt.model_validate_json(made.model_dump_json())).needs_state == "x"


def test_the_manifests_that_the_journal_recorded_are_passed_to_the_trainers(tmp_path: Path) -> None:
    of, digests = plan(), [64 * digit for digit in "abc"]
    saved = zip((0, 0, 1), ("4.0", "4.0", "4.0@2.1"), digests, strict=True)
    recorded = [StateSaved(rank=rank, state=state, manifest=digest) for rank, state, digest in saved]
    history = fold(recorded, history_before(of, 3))
    made = new_attempt(
        RunDir(tmp_path),
        of,
        history,
        layouts=[local_layout(tmp_path / "node", 2)],
        starting_port=20_000,
    )
    spec = AttemptSpec.from_json(spec_of(of, made).to_json())
    assert [*map(tuple, spec.manifests)] == [("4.0", digests[0]), ("4.0", digests[1]), ("4.0@2.1", digests[2])]
    assert digests[0] not in made.model_dump_json(), "the journal has them once"
    document = json.loads(spec.to_json())
    del document["manifests"]
    assert AttemptSpec.from_json(json.dumps(document)).manifests == []
