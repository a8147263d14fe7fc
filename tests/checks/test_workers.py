"""worker_layer: what is known of the workers by other checks is shown, what is left of earlier runs is found."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from engine.checks import workers as check
from engine.checks.interpreter import Interpreter
from engine.cluster.probe_results import StaleProcesses
from engine.config.models import Config
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckStatus, NodeFacts
from engine.protocol.attempt import NONCE_ENV
from tests.checks.conftest import run_check
from tests.checks.recorded import mac, studio

GOOD = Interpreter("3.12.4", {"mlx": "0.32.4", "mlx-lm": "0.32.2"}, backends=("ring", "jaccl"))
NOTHING = StaleProcesses(stale=[], marked_seen=True)


def test_good_workers_pass_and_show_what_the_other_checks_have_found() -> None:
    config = studio()
    seen = {node.name: GOOD for node in config.nodes}
    facts = {name: mac(name) for name in seen}
    result = check.evaluate(config, dict.fromkeys(seen, NOTHING), seen, facts, "jaccl-ring")
    assert result.status is CheckStatus.PASS
    assert result.evidence["max"] == (
        "host key known, python 3.12.4, mlx 0.32.4, mlx-lm 0.32.2, jaccl-ring available, clock +0.010 s, "
        "no processes of earlier runs"
    )


@pytest.mark.parametrize(
    ("system", "fix"),
    [
        ("Darwin", "sudo sntp -sS time.apple.com"),
        ("Linux", "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd"),
    ],
)
def test_a_clock_that_is_off_warns_with_what_sets_it(system: str, fix: str) -> None:
    config = studio()
    seen = {node.name: GOOD for node in config.nodes}
    facts = {"ultra": mac("ultra"), "max": mac("max").model_copy(update={"clock_skew_s": -3_600.0, "system": system})}
    result = check.evaluate(config, dict.fromkeys(seen, NOTHING), seen, facts, "ring")
    assert (result.status, result.summary) == (CheckStatus.WARN, "max: its clock is 3,600.0 s behind this machine's")
    assert result.fixes == {"max": fix}
    # sudo asks for a password: it needs a terminal.
    assert (result.fix_command or "").startswith("ssh -t ana@max.local 'sudo ")


def test_a_node_that_shows_no_environment_is_said_before_the_launch() -> None:
    config = studio()
    seen = {node.name: GOOD for node in config.nodes}
    stale = dict.fromkeys(seen, NOTHING) | {"max": StaleProcesses(stale=[], marked_seen=False)}
    result = check.evaluate(config, stale, seen, {name: mac(name) for name in seen}, "ring")
    assert result.status is CheckStatus.WARN
    assert result.summary.startswith("max: its system shows no environment of a process that was just started")


def test_a_failed_probe_is_no_silent_pass() -> None:
    config = studio()
    seen = {node.name: GOOD for node in config.nodes}
    unknown = mac("max").model_copy(update={"clock_skew_s": None})
    facts: dict[str, NodeFacts] = {"ultra": mac("ultra"), "max": unknown}
    result = check.evaluate(config, dict.fromkeys(seen, NOTHING), seen, facts, "ring")
    assert (result.status, "its clock could not be compared" in result.summary) == (CheckStatus.WARN, True)
    left: dict[str, StaleProcesses | FlightDeckError] = {"ultra": NOTHING, "max": LaunchError("no answer within 20 s")}
    result = check.evaluate(config, left, seen, {name: mac(name) for name in seen}, "ring")
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "max"))


@pytest.mark.alone
async def test_a_rank_that_nobody_watches_is_found_on_this_machine_and_its_fix_ends_it(config: Config) -> None:
    environment = {**os.environ, NONCE_ENV: "nobody-watches-this"}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    orphan = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    try:
        result = await run_check(check.run, config)
        assert (result.status, result.blames) == (CheckStatus.FAIL, (0, "node0")), result
        assert f"a rank of an earlier run is alive: pid {orphan.pid}" in result.summary
        assert result.fix_command == f"kill -9 {orphan.pid}"
        await asyncio.to_thread(subprocess.run, result.fix_command, shell=True, check=True)
        assert await asyncio.to_thread(orphan.wait, 10) == -signal.SIGKILL
        assert (await run_check(check.run, config)).status is CheckStatus.PASS
    finally:
        orphan.kill()
        await asyncio.to_thread(orphan.wait)
