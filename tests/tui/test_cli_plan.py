"""`flightdeck plan`: in prose, as the document, and what it exits with. The engine is real, the node this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tui.commands import Done, flightdeck

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def studio(tmp_path: Path) -> Path:
    """A folder with a model's config.json (planning needs no more of it), data, and a configuration of two ranks."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n{"text": "three"}\n')
    write(tmp_path)
    return tmp_path


def write(folder: Path, *lines: str) -> None:
    nodes = '[[node]]\nname = "one"\n[[node]]\nname = "two"\n'
    job = ["[job]", 'model = "model"', 'data = "data"', *lines]
    (folder / "flightdeck.toml").write_text(nodes + "\n".join(job) + "\n")


def plan(home: Path, folder: Path, *arguments: str) -> Done:
    return flightdeck(home, "plan", *arguments, cwd=folder)


def test_in_prose_it_says_what_would_be_launched_and_what_is_not_known(home: Path, studio: Path) -> None:
    done = plan(home, studio)
    assert done.code == 0, done.err
    for text in (
        "data, 2 ranks on 1 machine",
        "4 per update: one 2 + two 2",
        "not known: not calibrated",
        "3 examples, counted in train.jsonl on one",
        "hardware calibration missing, assuming equal performance",
        "mlx.launch",
    ):
        assert text in done.out, text


def test_explained_every_choice_has_its_reason_and_source(home: Path, studio: Path) -> None:
    write(studio, "batch_size = 6")
    text = plan(home, studio, "--explain").out
    assert "total_batch_size = 6: the job sets batch_size = 6 over all ranks" in text and "(configuration)" in text
    assert "mlx-lm's default; the job sets none (default)" in text
    assert "config.json" in text and "(rule)" in text and "not calibrated (unknown)" in text


def test_as_json_it_is_one_document(home: Path, studio: Path) -> None:
    done = plan(home, studio, "--json")
    document = json.loads(done.out)
    assert (done.code, document["version"], document["memory"]["layers"]) == (0, "2.0.0", 4)
    assert json.loads(plan(home, studio, "--format", "v2").out).keys() == document.keys()
    older = json.loads(plan(home, studio, "--format", "v1").out)
    assert "version" not in older and len(older) == 7


def test_another_strategy_is_planned_as_if_the_job_said_so(home: Path, studio: Path) -> None:
    done = plan(home, studio, "--json", "--strategy", "pipeline")
    document = json.loads(done.out)
    assert (done.code, document["refusals"]) == (0, [])
    assert (document["strategy"]["parallelism"], document["strategy"]["layer_split"]) == ("pipeline", "0-2,2-4")


def test_a_pipelines_layers_can_be_given(home: Path, studio: Path) -> None:
    document = json.loads(plan(home, studio, "--json", "--layer-split", "0-1,1-4").out)
    assert (document["strategy"]["parallelism"], document["strategy"]["layer_split"]) == ("pipeline", "0-1,1-4")
    done = plan(home, studio, "--layer-split", "0-1,1-3")
    assert done.code == 1 and "ends at layer 3, and the model has 4" in done.err + done.out
    for arguments, text in (
        (["--layer-split", "0-1;1-4"], "is not a range of layers"),
        (["--layer-split", "0-1,1-2,2-4"], "2 ranges, one per node, not 3"),
        (["--layer-split", "0-1,1-4", "--strategy", "sharded"], 'unless strategy = "pipeline"'),
    ):
        done = plan(home, studio, *arguments)
        assert done.code == 2 and text in done.err
    assert document["distributed_config"]["mlx_launch_command"] is None


def test_a_model_that_fits_nowhere_is_refused_with_1_and_the_document_is_there(home: Path, studio: Path) -> None:
    vast = CONFIG | {"hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 200}
    (studio / "model/config.json").write_text(json.dumps(vast))
    done = plan(home, studio, "--json")
    document = json.loads(done.out)
    assert (done.code, [refusal["name"] for refusal in document["refusals"]]) == (1, ["memory"])
    assert "it fits on no node" in done.err and "--skip hardware_layer" in done.err


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        ({"poisoning_detected": True}, 1, "poisoning_detected: true"),
        ({"overall_ready": False}, 0, "overall_ready: false"),
        (
            {"ifd_score": {"total_examples": 120_000}},
            0,
            "120,000 examples, the data quality report; 3 chunks of 50,000",
        ),
    ],
)
def test_the_data_report_warns_blocks_and_counts(
    home: Path, studio: Path, report: dict[str, Any], code: int, text: str
) -> None:
    (studio / "report.json").write_text(json.dumps(report))
    write(studio, 'data_quality_report = "report.json"')
    done = plan(home, studio)
    assert (done.code, text in done.out) == (code, True), done.out


@pytest.mark.parametrize("path", ["../report.json", "/etc/passwd", "none.json"])
def test_a_report_out_of_bounds_or_not_there_never_passes_silently(home: Path, studio: Path, path: str) -> None:
    write(studio, f'data_quality_report = "{path}"')
    done = plan(home, studio)
    assert done.code == 2 or "warn data_quality" in done.out, (done.code, done.out, done.err)


def test_a_model_that_is_not_there_leaves_the_memory_open(home: Path, studio: Path) -> None:
    (studio / "model/config.json").unlink()
    document = json.loads(plan(home, studio, "--json").out)
    assert document["memory"]["enabled"] is False and "config.json" in document["memory"]["reason"]


def test_without_a_configuration_it_is_bad_usage(home: Path, tmp_path: Path) -> None:
    assert plan(home, tmp_path).code == 2


def test_what_the_rules_suggest_is_written_into_the_configuration(home: Path, studio: Path) -> None:
    write(studio, "batch_size = 6  # mine", "iters = 100", 'env = { MINE = "1" }')
    before = (studio / "flightdeck.toml").read_text()
    suggested = json.loads(plan(home, studio, "--json").out)["batch_configuration"]["suggested"]
    done = plan(home, studio, "--apply")
    assert done.code == 0 and "flightdeck.toml.bak" in done.out, done.err
    text = (studio / "flightdeck.toml").read_text()
    for line in suggested["job_keys"].splitlines():
        assert line in text and line in done.out
    assert "# mine" in text and (studio / "flightdeck.toml.bak").read_text() == before
    # What it makes run was accepted before, and this is no other's text.
    batch = json.loads(flightdeck(home, "plan", "--json", cwd=studio, accept=False).out)["batch_configuration"]
    assert batch["total_batch_size"] == suggested["total_batch_size"]
    assert batch["learning_rate"] == suggested["learning_rate"] and batch["warmup_steps"] == suggested["warmup_steps"]


def test_a_command_of_ones_own_has_nothing_to_apply(home: Path, tmp_path: Path) -> None:
    (tmp_path / "flightdeck.toml").write_text('[[node]]\n[job]\ncommand = ["true"]\n')
    done = plan(home, tmp_path, "--apply")
    assert done.code == 2 and "there is nothing to apply: the job runs a command of its own" in done.err


def test_the_files_of_a_torch_job_are_written_and_listed(home: Path, studio: Path) -> None:
    write(studio, 'framework = "torch"')
    done = plan(home, studio, "--write", "files", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["written"] == ["files/job.json", "files/configmap.yaml", "files/pytorchjob.yaml"]
    assert json.loads((studio / "files/job.json").read_text())["job"]["strategy"] == "ddp"
    prose = plan(home, studio, "--explain").out
    for text in ("with torchrun it is", "<- chosen", "DDP fits", "the ranks compute on the CPU"):
        assert text in prose, text


def test_an_mlx_job_has_no_files_to_write(home: Path, studio: Path) -> None:
    done = plan(home, studio, "--write", "files")
    assert done.code == 2 and "framework" in done.err
    assert not (studio / "files").exists()


def test_a_grid_is_a_line_or_a_document_for_each_run(home: Path, studio: Path) -> None:
    settings = ("--set", "learning_rate=1e-5,5e-5", "--set", "batch_size=4,8", "--set", "name=tiny")
    done = plan(home, studio, *settings)
    assert done.code == 0, done.err
    names = [f"tiny-lr{rate}-batch{batch}" for rate in ("1e-05", "5e-05") for batch in (4, 8)]
    assert [line.split()[0] for line in done.out.splitlines()] == names
    documents = json.loads(plan(home, studio, *settings, "--json").out)
    assert [document["job"] for document in documents] == names
    assert plan(home, studio, *settings, "--apply").code == 2


def test_set_goes_over_the_file_and_its_faults_are_said_of_it(home: Path, studio: Path) -> None:
    assert "6 per update" in plan(home, studio, "--set", "batch_size=6").out
    done = plan(home, studio, "--set", "batch_size=0", "--set", "checkpoint.evry=2")
    assert done.code == 2 and done.err.splitlines() == [
        "--set: job.batch_size = 0: expected a whole number, 1 or more",
        "--set: checkpoint.evry = 2: expected a known key; did you mean every?",
    ]
    launched = flightdeck(home, "launch", "--set", "seed=1,2", cwd=studio)
    assert launched.code == 2 and "--set asks for 2 runs" in launched.err
    assert flightdeck(home, "--set", "seed=1", "plan", cwd=studio, accept=False).code == 2
