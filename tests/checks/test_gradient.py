"""gradient_layer starts a real mlx.launch ring; what goes wrong there is named by rank, cause before consequence."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.checks import gradient as check
from engine.checks.gradient import AllSumOutcome
from engine.config.models import Config
from engine.failures.explanation import explain, findings
from engine.failures.signature import SignatureKind
from engine.failures.signatures import BY_ID, SIGNATURES
from engine.models import CheckStatus
from engine.node.processes import with_nonce
from engine.protocol.measurements import AllSumResult
from tests.checks.conftest import make_config, run_check


async def test_two_ranks_sum_exactly_and_leave_nothing_behind(
    config: Config, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "the-nonce-of-this-test")
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.PASS, result
    assert result.summary.startswith("2 ranks, exact, ")
    assert set(result.evidence) == {"node0", "node1"}
    assert with_nonce("the-nonce-of-this-test") == []
    assert sorted(path.name for path in (home / "node").iterdir()) == ["bundles", "runs"]
    assert list((home / "node" / "runs").iterdir()) == []
    assert (home / "node").stat().st_mode & 0o077 == 0


async def test_the_temporary_files_of_mlx_launch_go_with_the_check(
    model: Path, data: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, names = tmp_path / "bin", tmp_path / "names"
    programs.mkdir()
    shown = f'file=$({shutil.which("mktemp")}) && echo "$file" && realpath "$file" >>{shlex.quote(str(names))}'
    (programs / "mktemp").write_text(f"#!/bin/sh\n{shown}\n")
    (programs / "mktemp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable,)))
    made = [Path(name) for name in names.read_text().splitlines()]
    assert made and all(file.is_relative_to(home / "node") and not file.exists() for file in made), made


async def test_one_rank_is_a_group_of_one_and_says_so(model: Path, data: Path, tmp_path: Path, home: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable,)))
    assert (result.status, "nothing is exchanged" in result.summary) == (CheckStatus.PASS, True)


async def test_a_rank_without_an_interpreter_is_blamed_and_not_the_one_that_waits(
    model: Path, data: Path, tmp_path: Path, home: Path
) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable, "/no/such/python")))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert "/no/such/python" in result.summary


async def test_cancelling_ends_the_ring(config: Config, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = "the-nonce-of-a-cancelled-check"
    monkeypatch.setattr(secrets, "token_hex", lambda _: nonce)
    task = asyncio.create_task(run_check(check.run, config))
    while len(with_nonce(nonce)) < 3:
        assert not task.done()
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert with_nonce(nonce) == []


def measured(rank: int, size: int, *, exact: bool = True) -> AllSumResult:
    return AllSumResult(rank, size, exact, latency_s=1e-4, bandwidth_bytes_per_s=1e9)


def found(
    *results: AllSumResult | None, left: str = "", outputs: tuple[str, str] = ("", ""), **codes: int
) -> AllSumOutcome:
    """What has become of two ranks; `rank1=-9` is how rank 1 has ended."""
    ends = {int(name.removeprefix("rank")): code for name, code in codes.items()}
    lines = {rank: output.splitlines() for rank, output in enumerate(outputs)}
    return AllSumOutcome(dict(enumerate(results)), lines, ends, left)


def test_a_world_that_is_smaller_than_planned_fails(config: Config) -> None:
    result = check.evaluate(config, found(measured(0, 1), measured(1, 1)))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, "node0"))
    assert "a group of 1 where 2 are planned" in result.summary


def test_an_inexact_sum_fails_though_it_is_fast(config: Config) -> None:
    result = check.evaluate(config, found(measured(0, 2), measured(1, 2, exact=False)))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))


def test_a_lost_peer_is_a_consequence(config: Config) -> None:
    lost = AllSumResult(0, error="RuntimeError: [ring] connection to a peer was lost")
    result = check.evaluate(config, found(lost, None, rank1=-9))
    assert (result.blames, "ended with -9" in result.summary) == ((1, "node1"), True)


def test_what_could_not_be_ended_fails_a_sum_that_was_exact(config: Config) -> None:
    result = check.evaluate(config, found(measured(0, 2), measured(1, 2), left="on node1 is left: python"))
    assert (result.status, "on node1 is left" in result.summary) == (CheckStatus.FAIL, True)


def test_every_text_that_explains_a_runs_end_explains_a_failed_sum(config: Config) -> None:
    for signature in SIGNATURES:
        result = check.evaluate(config, found(measured(0, 2), None, outputs=("", signature.example), rank1=1))
        (known,) = findings([signature.example])
        explanation = f"({known.cause}); {known.fix}"
        assert (explanation in result.summary) is (signature.kind is not SignatureKind.NOISE), result.summary


NCCL_SYSTEM_ERROR = """Traceback (most recent call last):
  File "/bundle/engine/torch_trainer/allreduce_check.py", line 42, in check
    dist.all_reduce(mine)
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Call to bind failed: Cannot assign requested address
"""


def test_the_lines_below_the_first_of_an_error_explain_it(config: Config) -> None:
    error = AllSumResult(1, error="DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error")
    result = check.evaluate(config, found(measured(0, 2), error, outputs=("", NCCL_SYSTEM_ERROR)))
    assert "NCCL_SOCKET_IFNAME" in result.summary


BUSY = (
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
    "false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    "lost",
    [
        "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: [ring] Couldn't connect (error: 111)",
        "no result within 55 s: a peer does not respond",
        "PeerLost: [ring] connection to a peer was lost",
    ],
)
def test_a_rank_with_a_cause_is_blamed_before_one_that_waited_for_it(config: Config, lost: str) -> None:
    result = check.evaluate(config, found(AllSumResult(0, error=lost), AllSumResult(1, error=BUSY)))
    assert result.blames == (1, "node1")
    assert "end what holds the port" in result.summary and "or try again" in result.summary


def test_a_failed_program_leaves_its_traceback_to_be_explained(tmp_path: Path) -> None:
    program = (
        "from engine.protocol.measurements import AllSumResult\n"
        "from engine.training.group_bench import reported\n"
        f"with reported(AllSumResult(0), {str(tmp_path / 'result')!r}, 60.0, 'late'):\n"
        "    raise RuntimeError('NCCL error\\nncclSystemError: System call (')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert json.loads((tmp_path / "result").read_text())["error"] == "RuntimeError: NCCL error"
    known = explain(ended.stderr.splitlines())
    assert known is not None and known.signature is BY_ID["nccl.system_error"]
