"""What is collected for a plan, with this machine as the nodes, and what the checks say about memory."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engine.checks import plan_inputs, runner
from engine.checks.checkpoint import save_size
from engine.checks.context import CheckContext
from engine.checks.plan_inputs import (
    ClusterHistory,
    chosen_job,
    collect_plan_inputs,
    describe_memory,
    launch_decisions,
    memory_needs,
    memory_share,
    shared_plan,
)
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import Config
from engine.errors import LaunchError
from engine.measurements import Calibration, Division, LinkMeasure, NodeMeasure
from engine.models import NodeFacts
from engine.plan.context import PlanInputs
from engine.plan.document import ChosenSettings, PlanIssue, RankMemory
from engine.plan.fingerprint import fingerprint
from engine.plan.planner import make_plan
from tests.checks.conftest import fleet_of, make_config
from tests.checks.recorded import RANK
from tests.damage import stalled
from tests.demo_copies import made_demo
from tests.model_files import TINY_LLAMA
from tests.unit.plan.clusters import QWEN3_4B, inputs, ultra_and_max

pytestmark = pytest.mark.usefixtures("shared_agent")


def test_the_reserve_is_part_of_the_message_and_of_the_comparison() -> None:
    rank = RankMemory(**RANK)
    assert memory_share(rank) == 0.91
    assert describe_memory(rank) == "needs 91 GB of 100 GB (by estimate, 2 GB of it in reserve, limit by Metal)"


def test_what_is_not_known_is_not_compared() -> None:
    unlimited = RankMemory(**{**RANK, "limit_bytes": None})
    assert "not compared" in describe_memory(unlimited)
    assert [memory_share(each) for each in (unlimited, "no plan")] == [None] * 2


NOW = datetime.now(UTC)


def seen(config: Config, *, ago: timedelta = timedelta(0)) -> dict[str, NodeFacts]:
    return {
        node.name: NodeFacts(node=node.name, host=node.ssh, probed_at=NOW - ago, system="Linux", chip="one of these")
        for node in config.nodes
    }


async def collected(
    config: Config,
    fresh: dict[str, NodeFacts] | None = None,
    past: ClusterHistory = ClusterHistory(),  # noqa: B008
    **launch: Any,
) -> PlanInputs:
    async with fleet_of(config) as fleet:
        context = CheckContext(config, fleet, **launch)
        try:
            return await collect_plan_inputs(context, seen(config) if fresh is None else fresh, past)
        finally:
            await context.close()


async def test_the_models_configuration_and_the_examples_come_from_the_nodes(config: Config) -> None:
    inputs = await collected(config)
    assert inputs.model == TINY_LLAMA | {"torch_dtype": "bfloat16"} and "on node0" in inputs.model_source
    assert (inputs.examples, inputs.examples_source) == (40, "counted in train.jsonl on node0")
    hostfile = inputs.launching.hostfile
    assert hostfile is not None and hostfile.path is not None
    assert json.loads(Path(hostfile.path).read_text()) == hostfile.document


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "no JSON object"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "no JSON object"),
        ('{"a": "' + "x" * (1 << 18) + '"}', "more than 256 KiB"),
    ],
    ids=["cut off", "a list", "deep", "vast"],
)
async def test_an_invalid_config_json_is_reported_and_not_used(
    config: Config, model: Path, content: str, why: str
) -> None:
    (model / "config.json").write_text(content)
    inputs = await collected(config)
    assert inputs.model is None and why in inputs.model_source


@pytest.mark.parametrize(("gigabytes", "recomputed"), [(22, True), (512, False)])
async def test_the_printed_launch_recomputes_where_the_plan_does(
    config: Config, model: Path, gigabytes: int, recomputed: bool
) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3_4B))
    job = config.job.model_copy(update={"mlx_lm": with_defaults({"batch_size": 2})})
    facts = {
        name: found.model_copy(update={"memory_total_bytes": gigabytes * 10**9}) for name, found in seen(config).items()
    }
    inputs = await collected(config.model_copy(update={"job": job}), facts)
    settings = make_plan(inputs).settings
    assert isinstance(settings, ChosenSettings) and bool(settings.grad_checkpoint) is recomputed
    assert ("--grad-checkpoint" in (inputs.launching.mlx_launch_command or "")) is recomputed


async def test_a_data_set_that_is_not_there_leaves_its_size_open(config: Config, data: Path) -> None:
    (data / "train.jsonl").unlink()
    inputs = await collected(config)
    assert inputs.examples is None and "train.jsonl" in inputs.examples_source


async def test_a_node_that_is_away_is_as_it_was_last_seen(config: Config) -> None:
    away = NodeFacts(node="node1", host="127.0.0.1", probed_at=NOW, problem="no route to host")
    before = seen(config, ago=timedelta(hours=3))
    inputs = await collected(config, seen(config) | {"node1": away}, ClusterHistory(facts=tuple(before.values())))
    assert inputs.problems == {"node1": "no route to host"}
    assert inputs.facts["node1"] == before["node1"]


async def test_what_another_host_was_is_not_taken_for_the_node(config: Config) -> None:
    away = NodeFacts(node="node1", host="127.0.0.1", probed_at=NOW, problem="no route to host")
    other = seen(config)["node1"].model_copy(update={"host": "elsewhere"})
    inputs = await collected(config, seen(config) | {"node1": away}, ClusterHistory(facts=(other,)))
    assert "node1" not in inputs.facts


async def test_a_node_that_has_finished_nothing_when_it_was_measured_is_left_out(config: Config) -> None:
    speeds = {"node0": 2.0, "node1": 0.0}
    taken = Calibration(
        cluster=config.cluster.name,
        job=config.job.name,
        fingerprint=fingerprint(config, seen(config).values()),
        taken_at=NOW,
        nodes=tuple(NodeMeasure(node=name, host="127.0.0.1", examples_per_s=speed) for name, speed in speeds.items()),
        all_ranks=LinkMeasure(nodes=tuple(speeds)),
    )
    inputs = await collected(config, past=ClusterHistory(calibrations=(taken,)))
    assert inputs.calibration == taken and inputs.left_out == ("node1",)
    assert [node.name for node in inputs.config.nodes] == ["node0"]


async def test_what_a_run_was_made_with_is_taken_and_not_what_would_be_found_now(config: Config) -> None:
    """The nodes are fewer than were measured: no fingerprint of theirs finds the calibration."""
    speeds = {"node0": 2.0, "node1": 1.0, "gone": 1.0, "off": 0.0}
    taken = Calibration(
        cluster=config.cluster.name,
        job=config.job.name,
        fingerprint="of four nodes",
        taken_at=NOW,
        nodes=tuple(NodeMeasure(node=name, host="127.0.0.1", examples_per_s=speed) for name, speed in speeds.items()),
        all_ranks=LinkMeasure(nodes=tuple(speeds)),
    )
    parts = {"node0": 0.5, "node1": 0.25, "gone": 0.25}
    known = {"source": "calibrated", "reason": "measured", "warnings": ("off counts as offline",)}
    division = Division.model_validate({**known, "parts": parts, "left_out": ("off",)}).without({"gone"})
    inputs = await collected(config, division=division, calibration=taken)
    assert (inputs.calibration, inputs.left_out) == (taken, ("off",))
    plan = await asyncio.to_thread(make_plan, inputs)
    assert [node.share for node in plan.nodes] == pytest.approx([2 / 3, 1 / 3])
    warnings = " ".join(warning.text for warning in plan.warnings)
    assert "gone is left out: a preflight check excluded it" in warnings
    assert "off counts as offline" in warnings and "off completed no step" not in warnings
    assert plan.performance_targets.throughput is None


async def test_a_count_that_takes_long_on_one_node_is_not_waited_for(config: Config, data: Path) -> None:
    """All are asked at once: a node whose disk hangs holds nobody up."""
    hanging = data.parent / "hanging"
    hanging.mkdir()
    (hanging / "train.jsonl").touch()
    first, second = config.nodes
    slow = config.model_copy(update={"nodes": (first.model_copy(update={"data": str(hanging)}), second)})
    with stalled(hanging / "train.jsonl"):
        async with asyncio.timeout(20):
            inputs = await collected(slow)
    assert (inputs.examples, inputs.examples_source) == (40, "counted in train.jsonl on node1")


async def test_the_checks_and_the_launch_share_one_plan(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(wraps=make_plan)
    monkeypatch.setattr(plan_inputs, "make_plan", made)
    monkeypatch.setattr(plan_inputs, "shared_plan_inputs", AsyncMock(return_value=inputs(ultra_and_max())))
    async with fleet_of(config) as fleet, CheckContext(config, fleet) as context:
        asked = memory_needs(context), launch_decisions(context), save_size(context), chosen_job(context)
        await asyncio.gather(*asked)
    assert made.call_count == 1


async def test_a_plan_that_cannot_be_made_is_one_line(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_inputs, "make_plan", Mock(side_effect=ZeroDivisionError("no ranks")))
    monkeypatch.setattr(plan_inputs, "shared_plan_inputs", AsyncMock())
    async with fleet_of(config) as fleet, CheckContext(config, fleet) as context:
        with pytest.raises(LaunchError, match="the training cannot be planned: ZeroDivisionError: no ranks"):
            await shared_plan(context)


async def test_secrets_of_the_job_are_not_in_what_is_planned(config: Config) -> None:
    job = config.job.model_copy(
        update={"env": {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "DATABASE": "pg://a:b@c", "NCCL_DEBUG": "3"}}
    )
    inputs = await collected(config.model_copy(update={"job": job}))
    shown = [inputs.rank_environment[name] for name in ("HF_TOKEN", "DATABASE", "NCCL_DEBUG")]
    assert shown == ["[redacted]", "[redacted]", "3"]
    assert "hf_abcdefghijklmnopqrst" not in (inputs.launching.mlx_launch_command or "")
    assert any("HF_TOKEN" in note for note in inputs.launching.launch_notes)


async def test_a_report_through_a_link_that_leads_out_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "report.json").symlink_to("/etc/passwd")
    job = config.job.model_copy(update={"data_quality_report": str(tmp_path / "report.json")})
    placed = config.model_copy(update={"job": job, "file": tmp_path / "flightdeck.toml"})
    inputs = await collected(placed)
    assert inputs.report is None and "outside of the allowed directories" in (inputs.report_problem or "")


@pytest.fixture
def swanlab(tmp_path: Path) -> Path:
    """An interpreter with the libraries of this one and, as its tests write it, a package swanlab."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "this.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return site / "swanlab"


async def obstacles(config: Config) -> tuple[PlanIssue, ...]:
    """By an agent whose environment is as it is now."""
    async with fleet_of(config, own_agent=True) as fleet:
        context = CheckContext(config, fleet)
        try:
            return (await collect_plan_inputs(context, seen(config), ClusterHistory())).obstacles
        finally:
            await context.close()


async def test_a_reporter_without_its_package_or_key_is_refused(
    model: Path, data: Path, tmp_path: Path, swanlab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    python = str(tmp_path / "venv" / "bin" / "python")
    config = make_config(
        model, data, tmp_path, pythons=(python, sys.executable), settings={"report_to": "swanlab, tensorboard"}
    )
    (missing,) = await obstacles(config)
    assert missing.text == (
        f"report_to names swanlab, which {python} on node0 cannot import; "
        f"`uv pip install --python {python} swanlab` there, or remove it from report_to"
    )
    swanlab.mkdir()
    (swanlab / "__init__.py").write_text("")
    (keyless,) = await obstacles(config)
    assert "for which node0 has no API key; `swanlab login` there, or set SWANLAB_API_KEY here" in keyless.text
    offline = config.job.model_copy(update={"env": {"SWANLAB_MODE": "offline"}})
    assert await obstacles(config.model_copy(update={"job": offline})) == ()
    own_server = config.job.model_copy(update={"env": {"SWANLAB_BASE_URL": "https://swanlab.example"}})
    assert await obstacles(config.model_copy(update={"job": own_server})) == ()
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 40)
    assert await obstacles(config) == ()
    monkeypatch.delenv("SWANLAB_API_KEY")
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab" / ".netrc").write_text("machine https://api.swanlab.cn/api login user password secret\n")
    assert await obstacles(config) == ()


async def test_wandb_is_refused_without_its_package_or_key_on_this_machine(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test of this process may have imported it.
    before = "wandb" in sys.modules
    """Without importing it. TensorBoard's files need no package."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config(model, data, tmp_path, settings={"report_to": "tensorboard,wandb"})
    found = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    there: list[importlib.machinery.ModuleSpec | None] = [None]
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: there[0] if name == "wandb" else real(name, package)
    )
    (missing,) = await obstacles(config)
    install = f"`uv pip install --python {sys.executable} wandb` here"
    assert missing.text == (
        f"report_to names wandb, which {sys.executable} on this machine cannot import; "
        f"{install}, or remove it from report_to"
    )
    there[0] = found
    (keyless,) = await obstacles(config)
    assert f"for which this machine has no API key; `{sys.executable} -m wandb login` here, or set" in keyless.text
    for env in ({"WANDB_MODE": "offline"}, {"WANDB_BASE_URL": "https://wandb.example"}):
        job = config.job.model_copy(update={"env": env})
        assert await obstacles(config.model_copy(update={"job": job})) == ()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert await obstacles(config) == ()
    assert ("wandb" in sys.modules) is before


@pytest.mark.usefixtures("tried_here")
async def test_the_plan_names_rows_that_the_chat_template_refuses(data: Path, tmp_path: Path) -> None:
    config = make_config(made_demo() / "model", data, tmp_path)
    # The demo's template reads the content of each message.
    rows = [{"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": "a"}]}]
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    async with fleet_of(config) as fleet:
        context = CheckContext(config, fleet)
        try:
            plan = await runner.make_training_plan(context, seen(config).values())
        finally:
            await context.close()
    assert [issue.text.split(" (")[0] for issue in plan.refusals] == [
        f"{data}/train.jsonl: line 1 is refused by the model's chat template"
    ]
