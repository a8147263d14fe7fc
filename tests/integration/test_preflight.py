"""Preflight on the test cluster: all is well there; a fault of one node is found, and blamed on that node."""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checks import connectivity, dataset, gradient, hostfile, model_files, ports, program, versions
from engine.checks.check import Check
from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.cluster.transport.fleet import Fleet
from engine.config.models import ClusterConfig, select_nodes
from engine.models import CheckStatus
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Traffic
from tests.integration.checks import (
    LISTEN,
    PORT,
    as_user,
    assert_nothing_left,
    config_of,
    furnish,
    run_check_on,
    unheard,
)


async def test_three_good_nodes_pass_every_check_and_nothing_is_left_on_them(
    cluster: Cluster, fleet: Fleet, patient_checks: dict[str, Check]
) -> None:
    nodes = cluster.nodes[:3]
    for node in nodes:
        furnish(node)
    config = select_nodes(config_of(cluster), {node.name for node in nodes})
    settings = {**config.job.mlx_lm, "batch_size": 3}
    config = config.model_copy(update={"job": config.job.model_copy(update={"mlx_lm": settings})})
    context = CheckContext(config, fleet)
    report = await run_checks(context, on_result=lambda _: None, checks=patient_checks, audit=unheard)
    await context.close()
    found = {result.name: result for result in report.checks}
    for name in ("worker_layer", "hardware_layer"):
        assert found[name].status is CheckStatus.PASS, found[name]
    for node in nodes:
        heartbeat = found["health_check"].evidence[node.name]
        assert re.match(r"(.* )?heartbeat in \d+\.\d ms, \d+\.\d s ago", heartbeat), heartbeat
    speed = found["performance_layer"]
    assert (speed.status, speed.summary) == (
        CheckStatus.WARN,
        "hardware calibration missing, assuming equal performance",
    )
    # Of warnings there is what these nodes are: disks of a few megabytes, and not calibrated.
    unwell = {name for name, result in found.items() if result.status in (CheckStatus.WARN, CheckStatus.FAIL)}
    assert unwell <= {"performance_layer", "health_check", "pre_rdma_sync"}, found
    assert report.overall_status is CheckStatus.WARN, found
    assert [name for name, result in found.items() if result.status is CheckStatus.SKIP] == ["program_present"]
    assert found["gradient_layer"].summary.startswith("3 ranks, exact")
    for name in ("ssh_connectivity", "versions_match", "hostfile_valid", "model_present", "data_matches"):
        assert set(found[name].evidence) == {node.name for node in nodes}
    for node in nodes:
        assert "reaches " in found["hostfile_valid"].evidence[node.name]
        assert_nothing_left(node)


@pytest.mark.slow
async def test_ranks_that_we_start_ourselves_sum_as_exactly(cluster: Cluster, fleet: Fleet) -> None:
    config = config_of(cluster)
    direct = config.model_copy(update={"cluster": ClusterConfig(launcher="direct")})
    result = await run_check_on(gradient.run, direct, fleet)
    assert (result.status, result.summary[:14]) == (CheckStatus.PASS, "4 ranks, exact"), result
    for node in cluster.nodes:
        assert_nothing_left(node)


async def test_a_missing_shard_and_a_differing_line_are_fixed_by_what_is_pasted(cluster: Cluster, fleet: Fleet) -> None:
    config = config_of(cluster)
    for node in cluster.nodes:
        furnish(node)
    third = cluster.nodes[2]
    third.run(["/bin/sh", "-c", 'rm ~/models/tiny/model.safetensors; echo \'{"text": "more"}\' >> ~/data/train.jsonl'])
    lost, other = await run_check_on(model_files.run, config, fleet), await run_check_on(dataset.run, config, fleet)
    assert (lost.status, lost.blames) == (CheckStatus.FAIL, (2, third.name))
    assert "no weights" in lost.summary
    assert (other.status, other.blames) == (CheckStatus.FAIL, (2, third.name))
    assert f"the data on {third.name} differs from" in other.summary
    assert "train.jsonl 13 lines against 12" in other.summary
    for result, check in ((lost, model_files), (other, dataset)):
        assert result.fix_command is not None
        done = await asyncio.to_thread(as_user, cluster, result.fix_command)
        assert done.returncode == 0, (result.fix_command, done.stderr)
        assert (await run_check_on(check.run, config, fleet)).status is CheckStatus.PASS


async def test_a_busy_port_names_its_holder_there(isolated_cluster: Cluster, fleet: Fleet) -> None:
    second = isolated_cluster.nodes[1]
    channel = await fleet.reach(second.ssh).open([second.python, "-c", LISTEN.format(port=PORT + 1)])
    assert await channel.read(10) == b"up\n"
    result = await run_check_on(ports.run, config_of(isolated_cluster, starting_port=PORT), fleet)
    await channel.close()
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, second.name))
    assert f"{second.ip}:{PORT + 1} on {second.name} is held by pid " in result.summary
    assert result.fixes == {}, "another program is its owner's to end"


async def test_a_missing_script_is_looked_for_on_the_node(cluster: Cluster, fleet: Fleet) -> None:
    for node in cluster.nodes[:3]:
        node.run(["/bin/sh", "-c", "touch ~/mine.py"])
    result = await run_check_on(program.run, config_of(cluster, command=True), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, cluster.nodes[3].name))
    for node in cluster.nodes[:3]:
        node.run(["/bin/sh", "-c", "rm ~/mine.py"])


async def test_another_mlx_on_one_node_is_named_with_what_installs_the_right_one(
    cluster: Cluster, fleet: Fleet
) -> None:
    third = cluster.nodes[2]
    stub = "__version__ = '0.32.3'\nclass distributed:\n    is_available = staticmethod(lambda name: True)\n"
    third.write("~/shadow/mlx/__init__.py", "")
    third.write("~/shadow/mlx/core.py", stub)
    wrapper = f'#!/bin/sh\nPYTHONPATH={third.home}/shadow exec {third.python} "$@"\n'
    third.write("~/other/bin/python", wrapper, mode=0o755)
    config = config_of(cluster)
    nodes = tuple(
        node.model_copy(update={"python": "~/other/bin/python"}) if node.name == third.name else node
        for node in config.nodes
    )
    context = CheckContext(config.model_copy(update={"nodes": nodes}), fleet)
    seen = {
        name: replace(found, packages={**found.packages, "mlx-lm": "0.32.2"})
        for name, found in (await context.interpreters()).items()
    }
    await context.close()
    result = versions.evaluate(context.config, seen)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (2, third.name))
    assert f"{third.name}: mlx 0.32.3, rank 0 has " in result.summary
    mlx = seen[nodes[0].name].packages["mlx"]
    installs = f"uv pip install --python \"$HOME\"/other/bin/python 'mlx[cpu]=={mlx}'"
    assert result.fixes == {third.name: installs}
    in_a_login_shell = f'"$SHELL" -lc {shlex.quote(installs)}'
    assert result.fix_command == f"ssh {third.ssh} {shlex.quote(in_a_login_shell)}"


async def test_a_missing_interpreter_is_left_to_the_check_of_versions(cluster: Cluster, fleet: Fleet) -> None:
    config = config_of(cluster)
    last = cluster.nodes[3].name
    nodes = (*config.nodes[:3], config.nodes[3].model_copy(update={"python": "~/nowhere/bin/python"}))
    context = CheckContext(config.model_copy(update={"nodes": nodes}), fleet)
    reached = await connectivity.run(context)
    result = versions.evaluate(context.config, await context.interpreters())
    await context.close()
    assert reached.status is CheckStatus.PASS, reached
    assert result.fixes[last].startswith('mkdir -p "$HOME" && mkdir "$HOME"/nowhere && sh -c \'uv venv --python ')


async def test_a_cut_between_two_ranks_is_found_before_anything_is_launched(
    isolated_cluster: Cluster, fleet: Fleet
) -> None:
    first, second = isolated_cluster.nodes[:2]
    first.cut(Traffic.RING, peer=second.ip)
    result = await run_check_on(hostfile.run, config_of(isolated_cluster), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, first.name))
    assert f"does not reach {second.name} on {second.ip} (no answer within" in result.summary


async def test_an_unknown_key_and_a_refused_connection_say_what_to_do(
    cluster: Cluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody_known = tmp_path / "ssh_config"
    config = cluster.ssh_config.read_text().replace(str(cluster.known_hosts), str(tmp_path / "none"))
    nobody_known.write_text(config)
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(nobody_known))
    cluster.nodes[3].stop_sshd()
    result = await run_check_on(connectivity.run, config_of(cluster), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, cluster.nodes[0].name))
    assert "the host key is not known" in result.evidence[cluster.nodes[0].name]
    assert "SHA256:" in result.evidence[cluster.nodes[0].name]
    assert result.fix_command == "flightdeck nodes --trust"
    assert set(result.fixes) == {node.name for node in cluster.nodes[:3]}
    assert "connection refused" in result.evidence[cluster.nodes[3].name]


async def test_a_changed_key_is_told_with_both_fingerprints_and_skips_what_needs_the_nodes(
    cluster: Cluster, fleet: Fleet
) -> None:
    second = cluster.nodes[1]
    second.change_host_key()
    context = CheckContext(config_of(cluster), fleet)
    report = await run_checks(context, on_result=lambda _: None, audit=unheard)
    await context.close()
    found = {result.name: result for result in report.checks}
    reached = found.pop("ssh_connectivity")
    assert (reached.status, reached.blames) == (CheckStatus.FAIL, (1, second.name))
    assert reached.evidence[second.name].count("SHA256:") == 2
    assert reached.evidence[cluster.nodes[0].name].startswith("answers in ")
    assert {result.status for result in found.values()} == {CheckStatus.SKIP}


@pytest.mark.slow
async def test_a_node_that_takes_no_bundle_is_the_only_one_blamed(isolated_cluster: Cluster, fleet: Fleet) -> None:
    last = isolated_cluster.nodes[3]
    last.run(["/bin/sh", "-c", "rm -rf ~/.flightdeck"])
    last.fill_disk()
    result = await run_check_on(connectivity.run, config_of(isolated_cluster), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, last.name)), result
    assert "the node bundle could not be staged" in result.evidence[last.name]
