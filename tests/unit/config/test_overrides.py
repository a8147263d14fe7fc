"""Values that are set beside the file: as texts, as a grid of runs, and in the file's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load_config, load_grid
from engine.config.overrides import MOST_RUNS, grid, named, parse_settings
from engine.errors import ConfigError, InputError

FILE = """
[node_defaults]
python = "/venv/bin/python"
[[node]]
name = "ana"
ssh = "ana.local"
[[node]]
name = "ultra"
ssh = "ultra.local"
[job]
model = "~/m"
data = "~/d"
config = "lora.yaml"
batch_tokens = 512
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (path := tmp_path / "flightdeck.toml").write_text(FILE)
    (tmp_path / "lora.yaml").write_text("lora_parameters: {rank: 4, scale: 7.0, dropout: 0.0}\nepochs: 2\n")
    return path


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("learning_rate=1e-5,5e-5", [1e-5, 5e-5]),
        ("learning_rate = 1e-5, auto", [1e-5, "auto"]),
        ("optimizer=adam,adamw,adam", ["adam", "adamw"]),
        ("seed=1,1", [1]),
        ("a=[1, 2]", [[1, 2]]),
        ('a="x,y"', ["x,y"]),
        ("a={rank = 4, scale = 1.0}", [{"rank": 4, "scale": 1.0}]),
        ("script=train.py --sizes 1,2", ["train.py --sizes 1,2"]),
        ("layer_split=0-8,8-36", ["0-8,8-36"]),
        ("report_to=tensorboard,wandb", ["tensorboard,wandb"]),
        ("a=", [""]),
        ("a=true", [True]),
        *(
            (f"env.A={text}", [text])
            for text in ("1.10", "123#456", "0x10", "1_000", "nan", "2024-01-01", "0,1", "[1]")
        ),
        ("job.env.A='a b'", ["a b"]),
        ('env.A="0,1","2,3"', ["0,1", "2,3"]),
    ],
)
def test_values_with_commas_between_are_a_grid_and_one_list_or_text_is_one(text: str, values: list[Any]) -> None:
    assert [next(iter(run.values())) for run in grid([text])] == values


def test_a_grid_has_every_combination_and_the_last_of_one_key() -> None:
    runs = grid(["seed=9", "learning_rate=1e-5,5e-5", "seed=1,2"])
    assert runs == [{"seed": seed, "learning_rate": rate} for seed in (1, 2) for rate in (1e-5, 5e-5)]
    assert grid([]) == [{}]
    with pytest.raises(InputError, match="asks for 2 runs"):
        parse_settings(["seed=1,2"])
    numbers = ",".join(map(str, range(20)))
    with pytest.raises(InputError, match=f"more than {MOST_RUNS} runs"):
        grid([f"seed={numbers}", f"iters={numbers}"])


def test_the_names_of_a_grid_differ_and_are_accepted(path: Path) -> None:
    runs = named(["support"] * 4, grid(["learning_rate=1e-5,0.5", "lora_parameters.rank=8", "seed=1,2"]))
    assert [run["name"] for run in runs] == [
        "support-lr1e-05-seed1",
        "support-lr1e-05-seed2",
        "support-lr0_5-seed1",
        "support-lr0_5-seed2",
    ]
    long = ",".join(f"{'x' * 70}{number}" for number in range(12))
    names = [config.job.name for config in load_grid(path, [f"project_name={long}"])]
    assert len(set(names)) == 12 and all(len(name) <= 64 for name in names)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["name=a,b"], ["a", "b"]),
        (["name=a,b", "seed=1,2"], ["a-seed1", "a-seed2", "b-seed1", "b-seed2"]),
        (["model=org/Qwen3-4B,~/m/Llama"], ["Qwen3-4B", "Llama"]),
        (["model=~/a/Qwen,~/b/Qwen"], ["Qwen-model-a-Qwen", "Qwen-model-b-Qwen"]),
        (["model=~/a/Qwen,~/b/Qwen,~/Llama"], ["Qwen", "Qwen-2", "Llama"]),
        (["model=~/Qwen-3,~/a/Qwen,~/b/Qwen,~/Qwen-2"], ["Qwen-3", "Qwen", "Qwen-2", "Qwen-2-2"]),
        (
            ["name=a,b", "model=~/Qwen,~/Phi"],
            ["a-model-Qwen", "a-model-Phi", "b-model-Qwen", "b-model-Phi"],
        ),
        (["model=~/a,~/b", "name=support"], ["support-model-a", "support-model-b"]),
    ],
)
def test_a_run_of_a_grid_is_named_after_its_own_job(tmp_path: Path, texts: list[str], names: list[str]) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_text('[cluster]\nname = "c"\n[[node]]\nname = "a"\npython = "/p"\n[job]\nmodel = "/m"\ndata = "/d"')
    assert [config.job.name for config in load_grid(file, texts)] == names


def test_they_go_over_the_file_and_its_yaml_and_one_way_to_say_it_over_the_other(path: Path) -> None:
    settings = {
        "lora_parameters.rank": 16,
        "iters": 50,
        "batch_size": 8,
        "job.optimizer": "adamw",
        "optimizer_config.adamw.weight_decay": 0.1,
        "checkpoint.every": 7,
        "node.ultra.python": "/other/python",
        "env.TRACE": "1",
    }
    config = load_config(path, settings)
    job = config.job.mlx_lm
    assert job["lora_parameters"] == {"rank": 16, "scale": 7.0, "dropout": 0.0}
    assert (job["iters"], job.get("epochs"), job["batch_size"], job.get("batch_tokens")) == (50, None, 8, None)
    assert job["optimizer_config"]["adamw"] == {"weight_decay": 0.1}
    assert (config.checkpoint.every, config.job.env) == (7, {"TRACE": "1"})
    assert [node.python for node in config.nodes] == ["/venv/bin/python", "/other/python"]
    assert config.overrides == settings
    assert load_config(path).overrides == {} and path.read_text() == FILE


@pytest.mark.parametrize(
    "settings", [{"node.ultra.python": "/x"}, {"node_defaults.python": "/x"}, {"node.ana.ssh": "eve.local"}]
)
def test_what_would_run_elsewhere_is_another_thing_to_accept(path: Path, settings: dict[str, Any]) -> None:
    assert load_config(path, settings).digest != load_config(path).digest == load_config(path, {"seed": 1}).digest


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"lora_parameters.rank": 0}, "--set: job.lora_parameters = "),
        ({"node.ultra.ips": ["::1"]}, "--set: node[1].ips[0] = '::1': expected an IPv4 address"),
        (
            {"node.eve.python": "/x"},
            "--set: 'node.eve.python' = (no such node): expected node.NAME.KEY with the name of a node",
        ),
        ({"node.python": "/x"}, "expected node.NAME.KEY"),
        ({"grad_checkpoint.x": 1}, "--set: job.grad_checkpoint = {'x': 1}: expected true or false"),
        ({"iters": 1, "epochs": 1}, "--set: job.epochs = 1: expected no value here: iters is set"),
        ({"env.A": [1]}, "--set: job.env.A = [redacted]: expected a string"),
        ({"": 1}, "--set: job.'' = 1: expected a known key"),
    ],
)
def test_faults_are_said_of_set(path: Path, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, settings)
    assert fault in str(caught.value)
