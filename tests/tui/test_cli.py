"""The commands as a shell sees them: exit codes, streams, JSON shapes, and one clear line for what is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE

import pytest

from engine.run.logs.mirror import Mirror
from engine.run.run_plan import write_plan
from tests.tui.commands import FLIGHTDECK, environment, flightdeck, shell
from tests.unit.run.logs.run_logs import RunLogs
from tests.unit.run.run_maker import START, MadeRun, make_run_config, report, validation

RUN_FIELDS = {
    "id",
    "name",
    "state",
    "reason",
    "rank",
    "host",
    "started_at",
    "ended_at",
    "attempts",
    "world_size",
    "backend",
    "iteration",
    "iterations",
    "train_loss",
    "val_loss",
    "test_loss",
    "tokens_per_second",
}


@pytest.fixture
def failed(home: Path) -> MadeRun:
    """Rank 1 of a run exited with 3 after a traceback."""
    run = MadeRun(home, name="broken")
    run.state("preflight", "launching").attempt().state("running", "finishing")
    run.metrics([validation(1, 5.5), report(10, 4.25), report(20, 3.125)])
    run.state("failed", reason="rank_failed", rank=1, host="node1", exit_code=3, cause="ValueError: no", iteration=20)
    run.directory.log(1).write_bytes(b"starting\nValueError: \x1b[31mno\x1b[0m\n")
    return run.close()


@pytest.fixture
def succeeded(home: Path) -> MadeRun:
    run = MadeRun(home, name="fine", created=START + timedelta(hours=1))
    run.state("preflight", "launching").attempt().state("running", "finishing")
    return run.state("succeeded", reason="completed").close()


def test_help_has_examples_for_every_command(home: Path) -> None:
    whole = shell(home, "--help")
    commands = re.findall(r"^    (\w+)  ", whole.out, re.MULTILINE)
    assert set(commands) >= {
        "demo",
        "launch",
        "abort",
        "preflight",
        "nodes",
        "doctor",
        "runs",
        "show",
        "logs",
        "metrics",
    }
    for command in commands:
        done = flightdeck(home, command, "--help")
        assert (done.code, f"flightdeck {command}" in done.out.partition("examples:")[2]) == (0, True)


COMMANDS = [
    ["runs", "--json"],
    ["show"],
    ["runs"],
    ["logs", "--rank", "1", "--raw"],
    ["metrics"],
    ["--help"],
    ["completion", "bash"],
    ["--version"],
]


def test_a_chart_is_a_file_and_a_metric_that_is_not_there_names_those_that_are(
    home: Path, failed: MadeRun, tmp_path: Path
) -> None:
    picture = tmp_path / "loss.svg"
    shown = flightdeck(home, "metrics", "broken", "--chart", str(picture), "--axis", "tokens")
    assert (shown.code, shown.out) == (0, f"wrote {picture}\n")
    assert ">loss</text>" in picture.read_text() and ">train</text>" in picture.read_text()
    refused = flightdeck(home, "metrics", "broken", "--chart", str(picture), "--metric", "power")
    assert refused.code == 2 and "it has loss" in refused.err
    refused = flightdeck(home, "metrics", "broken", "--chart", str(tmp_path / "loss.jpg"))
    assert refused.code == 2 and "neither .svg nor .png" in refused.err


@pytest.mark.needs("linux")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line(home: Path, failed: MadeRun, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([FLIGHTDECK, *arguments], stdout=full, stderr=PIPE, env=environment(home), check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == "flightdeck: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("locale", "shown"),
    [
        ({"PYTHONIOENCODING": "iso-8859-1"}, b"loss 6 -> 2... \xe9 \\u4e2d\n"),
        ({"LC_ALL": "C"}, b"loss 6 -> 2... \\xe9 \\u4e2d\n"),
    ],
    ids=["iso-8859-1", "C"],
)
def test_what_the_locale_lacks_is_ascii_and_a_foreign_character_its_escape(
    home: Path, failed: MadeRun, locale: dict[str, str], shown: bytes
) -> None:
    mirror = Mirror(failed.directory, lambda gap: None)
    mirror.follow(0, None, 0)
    failed.directory.log(0).write_bytes("loss 6 → 2… é 中\n".encode())
    mirror.pump()
    mirror.close()
    env = environment(home, **locale)
    done = subprocess.run([FLIGHTDECK, "logs", "--rank", "0"], capture_output=True, env=env, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, b"")


def test_the_console_keeps_its_columns_in_ascii() -> None:
    assert "╭─ 6 → 2… é 中 ▇".encode("ascii", "flightdeck.cells") == b"+- 6 > 2. ? ??  "


def test_closed_streams_are_no_error(home: Path, failed: MadeRun) -> None:
    closed = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", FLIGHTDECK, "show"]
    assert subprocess.run(closed, env=environment(home), check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["demo", "--ranks", "0"],
        ["demo", "--ranks", "two"],
        ["abort"],
        ["logs", "--rank", "1", "--launcher"],
        ["generate", "-p", " "],
        ["fetch", "last", "--best", "a", "b"],
        ["--read-only", "abort", "last"],
    ],
)
def test_bad_usage_exits_2_with_one_line_that_says_what_is_accepted(home: Path, arguments: list[str]) -> None:
    done = flightdeck(home, *arguments)
    assert (done.code, done.out) == (2, "")
    assert "error:" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["show", "logs", "metrics"])
def test_a_run_that_is_not_there_is_one_line_and_exit_2(home: Path, failed: MadeRun, command: str) -> None:
    done = flightdeck(home, command, "nowhere")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "flightdeck: no run 'nowhere': no id, id prefix or name is that (see `flightdeck runs`)"
    ]


@pytest.mark.needs("root", "setpriv")
def test_a_run_that_another_user_has_planted_is_not_adopted(tmp_path: Path, home: Path) -> None:
    """They copy one whose supervisor is gone, with a python of their own."""
    run, ran = MadeRun(tmp_path / "theirs", name="planted"), tmp_path / "ran"
    plan = json.loads(run.directory.plan.read_text())
    for node in plan["config"]["nodes"]:
        node["python"] = str(planted := tmp_path / "python")
    planted.write_text(f"#!/bin/sh\ntouch {ran}\n")
    planted.chmod(0o755)
    run.directory.plan.write_text(json.dumps(plan))
    run.close()
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    copy = ["setpriv", "--reuid=65534", "--clear-groups", "cp", "-R", str(tmp_path / "theirs" / "runs"), str(home)]
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path / "theirs")], check=True)
    subprocess.run(copy, check=True)
    for command in ("runs", "show", "doctor"):
        done = shell(home, command)
        assert (done.code, done.out) == (1, "")
        line = f"flightdeck: {home}: the state is not used: other users can write there: chmod go-w {home} "
        assert done.err.startswith(line) and len(done.err.splitlines()) == 1
    home.chmod(0o755)
    assert "belongs to another user" in shell(home, "runs").err, "what they have left there is not adopted either"
    assert not ran.exists()


def test_without_any_run_the_way_to_one_is_named(home: Path) -> None:
    listed, shown = flightdeck(home, "runs"), flightdeck(home, "show")
    assert (listed.code, "flightdeck demo" in listed.out) == (0, True)
    assert (shown.code, "flightdeck demo" in shown.err) == (2, True)


def test_the_console_needs_a_terminal(home: Path) -> None:
    done = shell(home)
    assert (done.code, "needs a terminal" in done.err) == (2, True)


def test_every_fault_of_a_configuration_is_a_line_and_nothing_is_started(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_text('[cluster]\nbackend = "smoke"\n[[node]]\nname = "a"\n[job]\nname = "x"\nbatch_size = "many"\n')
    for command in ("launch", "preflight", "nodes"):
        done = flightdeck(home, command, "-c", str(file))
        assert (done.code, done.out) == (2, "")
        lines = done.err.splitlines()
        assert len(lines) >= 2
        assert all(line.startswith(f"{file}: ") for line in lines)
    assert not (home / "runs").exists()


def test_the_configuration_of_the_working_directory_is_the_default(home: Path, tmp_path: Path) -> None:
    done = shell(home, "preflight", cwd=tmp_path)
    assert (done.code, "flightdeck.toml" in done.err) == (2, True)


def test_runs_are_listed_newest_first_with_all_their_fields(home: Path, failed: MadeRun, succeeded: MadeRun) -> None:
    done = flightdeck(home, "runs", "--json")
    records = json.loads(done.out)
    assert [record["id"] for record in records] == [succeeded.id, failed.id]
    assert set(records[0]) >= RUN_FIELDS
    broken = records[1]
    assert (broken["state"], broken["reason"], broken["rank"], broken["host"]) == ("failed", "rank_failed", 1, "node1")
    assert (broken["iteration"], broken["train_loss"], broken["val_loss"]) == (20, 3.125, 5.5)
    table = flightdeck(home, "runs", "-n", "1").out.splitlines()
    assert (len(table), succeeded.id in table[1]) == (2, True)


def test_show_tells_cause_fix_proof_and_place(home: Path, failed: MadeRun) -> None:
    done = flightdeck(home, "show", "broken")
    assert done.code == 0
    for part in ("failed: rank failed, rank 1 on node1 (exit 3)", "ValueError: no", str(failed.directory.path)):
        assert part in done.out
    assert "\x1b" not in done.out
    document = json.loads(flightdeck(home, "show", failed.id[:12], "--json").out)
    assert (document["id"], document["supervised"]) == (failed.id, False)


def test_show_tells_why_a_run_stopped_early(home: Path) -> None:
    why = "stopped early at iteration 40: the validation loss has not improved for 3 validations"
    run = MadeRun(home).state("preflight", "launching").attempt().state("running", "finishing")
    run.state("succeeded", reason="completed", cause=why, iteration=40).close()
    done = flightdeck(home, "show")
    assert "succeeded: completed, iteration 40/60" in done.out
    assert f"  note       {why}" in done.out


def test_show_explains_a_completed_run(home: Path) -> None:
    run = MadeRun(home).state("preflight", "launching").attempt().state("running", "finishing")
    how = {"cause": "not known yet is the exit record of rank 1", "fix": "see that node1 can be reached"}
    run.state("completed", reason="completed", iteration=60, unconfirmed=("node1",), **how).close()
    done = flightdeck(home, "show")
    assert "completed: completed, iteration 60/60" in done.out
    for line in ("note       not known yet", "fix        see that node1", "unconfirmed node1"):
        assert line in done.out
    assert "  completed  " in flightdeck(home, "runs").out
    resumed = flightdeck(home, "resume", "last")
    assert resumed.code == 2 and "has completed" in resumed.err and "node1 can be reached" in resumed.err


def test_runs_and_show_report_damaged_files(home: Path) -> None:
    run = MadeRun(home).state("preflight", "launching").attempt().state("running").supervised_by()
    run.metrics([report(1, 4.0)])
    run.directory.attempt(2).mkdir(parents=True)
    run.directory.plan.write_text("{")
    with run.directory.metrics.open("a") as file:
        file.write("\0\0\n")
    found = ["plan.json: the plan is not valid", "lacks attempt 2", "metrics.jsonl: 1 damaged line"]
    listed, shown = flightdeck(home, "runs"), flightdeck(home, "show")
    for text in found:
        assert text in listed.err and text in shown.out
    assert shown.out.count("  damage     ") == 3
    assert len(json.loads(flightdeck(home, "show", "--json").out)["damage"]) == 3
    run.state("failed").close()


def test_a_run_without_its_supervisor_is_taken_over_by_the_next_command(home: Path) -> None:
    run = MadeRun(home).state("preflight", "launching").attempt().close()
    listed = shell(home, "runs")
    assert f"{run.id} had lost its supervisor: another one has taken over" in listed.err
    assert [line for line in flightdeck(home, "logs", "-f").err.splitlines() if "had lost" in line] == []
    record = json.loads(flightdeck(home, "show", "--json").out)
    assert record["state"] in ("failed", "lost")


def test_the_loss_of_the_test_and_warnings_are_shown(home: Path) -> None:
    run = MadeRun(home).state("preflight", "launching").attempt().state("running")
    run.metrics([report(10, 4.25), {"kind": "test", "iteration": 10, "test_loss": 3.5, "test_ppl": 33.1}])
    run.events(1, {"event": "warning", "message": "some rows are cut"})
    run.state("succeeded", reason="completed").close()
    shown = flightdeck(home, "show").out
    assert "test loss 3.500" in shown and "  warning    rank 1: some rows are cut\n" in shown
    document = json.loads(flightdeck(home, "show", "--json").out)
    assert (document["test_loss"], document["ranks"][1]["warnings"]) == (3.5, ["some rows are cut"])
    table = flightdeck(home, "metrics").out.splitlines()
    assert "TEST LOSS" in table[0] and "3.5000" in table[2] and table[1].split()[:2] == ["10", "4.2500"]
    assert flightdeck(home, "metrics", "--format", "csv").out.splitlines()[-1] == "10,,,,,,,,,3.5,33.1"


def test_metrics_are_mlx_lms_own_dicts(home: Path, failed: MadeRun) -> None:
    documents = json.loads(flightdeck(home, "metrics", "broken", "--json").out)
    assert documents[0] == {"iteration": 1, "val_loss": 5.5, "val_time": 0.5}
    assert set(documents[1]) == {
        "iteration",
        "train_loss",
        "learning_rate",
        "iterations_per_second",
        "tokens_per_second",
        "trained_tokens",
        "peak_memory",
    }
    assert documents == json.loads(flightdeck(home, "metrics", "broken", "--format", "json").out)
    rows = list(csv.DictReader(io.StringIO(flightdeck(home, "metrics", "broken", "--format", "csv").out)))
    assert [row["train_loss"] for row in rows] == ["", "4.25", "3.125"]


def test_raw_logs_are_the_bytes_and_the_others_are_harmless(home: Path, failed: MadeRun) -> None:
    raw = subprocess.run(
        [FLIGHTDECK, "logs", "broken", "--rank", "1", "--raw"],
        capture_output=True,
        env=environment(home),
        check=True,
    )
    assert raw.stdout == failed.directory.log(1).read_bytes()
    assert flightdeck(home, "logs", "broken", "--raw").code == 2
    assert flightdeck(home, "logs", "broken", "--rank", "7").code == 2


def test_aborting_what_has_ended_says_so_and_is_no_failure(home: Path, failed: MadeRun) -> None:
    done = flightdeck(home, "abort", "broken")
    assert (done.code, "has ended already: failed" in done.out) == (0, True)


@pytest.mark.parametrize("arguments", COMMANDS[2:7], ids=" ".join)
def test_a_reader_that_has_left_is_one_line(home: Path, failed: MadeRun, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([FLIGHTDECK, *arguments], stdout=writer, stderr=PIPE, env=environment(home), check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"flightdeck: the output is cut: its reader has left\n")


def test_help_for_one_command_is_its_own_help(home: Path) -> None:
    assert flightdeck(home, "help", "abort").out == flightdeck(home, "abort", "--help").out
    assert flightdeck(home, "help").out == flightdeck(home, "--help").out


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["lauch"], "launch"),
        (["help", "rnus"], "runs"),
        (["runs", "--fliter=x"], "--filter"),
        (["launch", "--strategy", "shraded"], "sharded"),
        (["show", "brokn"], "broken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_meant_is_suggested(home: Path, failed: MadeRun, arguments: list[str], meant: str) -> None:
    done = flightdeck(home, *arguments)
    assert (done.code, done.out) == (2, "")
    assert f"did you mean {meant}?" in done.err.splitlines()[-1]


def test_output_is_without_colour_where_there_is_no_terminal(home: Path, failed: MadeRun) -> None:
    assert "\x1b" not in shell(home, "runs").out + flightdeck(home, "doctor").out


def test_the_doctor_names_what_this_machine_has(home: Path) -> None:
    findings = {finding["name"]: finding for finding in json.loads(flightdeck(home, "doctor", "--json").out)}
    assert set(findings) == {"mlx", "backends", "mlx.launch", "ssh", "rdma", "disk", "terminal"}
    assert (findings["mlx"]["status"], findings["mlx.launch"]["status"]) == ("pass", "pass")
    assert "ring" in findings["backends"]["summary"]


def test_starting_a_command_imports_neither_mlx_nor_textual() -> None:
    heavy = {"mlx", "textual", "rich", "numpy", "asyncssh", "tinydb"}
    probe = f"import tui.cli, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_figure_that_is_no_number_reaches_no_spreadsheet_and_no_parser(home: Path) -> None:
    """A node may report anything: a formula that a spreadsheet would run, or what is no JSON."""
    run = MadeRun(home, name="hostile").state("preflight", "launching").attempt().state("running")
    run.metrics([report(1, 4.0, tokens_per_second="=cmd|' /C calc'!A1"), report(2, float("nan"), peak_memory=1e999)])
    run.close()
    for command in (["show"], ["metrics"], ["runs"]):
        name = [] if command == ["runs"] else ["hostile"]
        json.loads(flightdeck(home, *command, *name, "--json").out, parse_constant=pytest.fail)
    first, second = csv.DictReader(io.StringIO(flightdeck(home, "metrics", "hostile", "--format", "csv").out))
    assert (first["train_loss"], first["tokens_per_second"]) == ("4.0", "")
    assert (second["train_loss"], second["peak_memory"]) == ("", "")


def test_no_command_prints_a_secret_but_raw(home: Path) -> None:
    """Right below the redacted cause the lines that prove it were printed as they came."""
    token, config = "hf_" + "aB3" * 11, make_run_config(name="telling")
    run = MadeRun(home, name="telling")
    env = {"SETTING": "correct-horse", "FLAG": "1", "DEVICE": "cpu"}
    config = config.model_copy(update={"job": config.job.model_copy(update={"env": env})})
    write_plan(run.directory.plan, run.plan.model_copy(update={"config": config}))
    run.state("preflight", "launching").attempt().state("running", "finishing")
    run.state("failed", reason="rank_failed", rank=1, host="node1", exit_code=1, cause=f"ValueError: 401 for {token}")
    secret = f"AUTH=s3cr3t-value, {token}, correct-horse on cpu:1\n-----BEGIN PRIVATE KEY-----\n{'MIIE' * 16}\n"
    RunLogs.mirrored(run.directory, 1, f"starting\n{secret}ValueError: 401 for {token}\n")
    run.close()
    commands = ["show"], ["show", "--json"], ["logs"], ["logs", "--rank", "1"], ["logs", "--json"], ["logs", "--follow"]
    for command in commands:
        done = flightdeck(home, *command[:1], "telling", *command[1:])
        assert done.code == 0
        for part in (token, "s3cr3t", "correct-horse", "MIIE"):
            assert part not in done.out, command
        if command[0] == "logs" and "--json" not in command:
            assert "on cpu:1" in done.out
    assert token in flightdeck(home, "logs", "telling", "--rank", "1", "--raw").out
