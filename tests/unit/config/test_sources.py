"""Where values and faults of a configuration are, and the configurations of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.config.sources import configurations, effective, placed
from engine.errors import ConfigError

FILE = """[cluster]
name = "studio"
[node_defaults]
python = "/venv/bin/python"
[[node]]
name = "ana"
ssh = "ana.local"
processes = 2
[[node]]
name = "ultra"
ssh = "ultra.local"
data = "~/here"
[job]
model = "~/m"
data = "~/d"
config = "lora.yaml"
learning_rate = "auto"
env = { MLX_LEVEL = "1", HF_TOKEN = "hf_abcdefghijklmnop" }
optimizer_config.adamw = { weight_decay = 0.1 }
[checkpoint]
every = 7
"""
YAML = "# ours\nlora_parameters:\n  rank: 4\n  scale: 7.0\nepochs: 2\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (path := tmp_path / "flightdeck.toml").write_text(FILE)
    (tmp_path / "lora.yaml").write_text(YAML)
    return path


def test_each_value_has_its_source(path: Path) -> None:
    values = {value.key: value for value in effective(path, {"checkpoint.keep": 9, "lora_parameters.scale": 3.0})}
    sources = {
        "cluster.name": "flightdeck.toml:2",
        "node.ana.ssh": "flightdeck.toml:7",
        "node.ultra.ssh": "flightdeck.toml:11",
        "node.ultra.python": "flightdeck.toml:4",
        "node.ultra.model": "flightdeck.toml:14",
        "node.ana.data": "flightdeck.toml:15",
        "node.ultra.data": "flightdeck.toml:12",
        "learning_rate": "flightdeck.toml:17 (auto)",
        "optimizer_config.adamw.weight_decay": "flightdeck.toml:19",
        "epochs": "lora.yaml:5",
        "lora_parameters.rank": "lora.yaml:3",
        "lora_parameters.scale": "--set",
        "lora_parameters.dropout": "default",
        "batch_size": "default",
        "checkpoint.every": "flightdeck.toml:21",
        "checkpoint.keep": "--set",
    }
    assert {key: values[key].source for key in sources} == sources
    assert values["lora_parameters.rank"].place == (path.parent / "lora.yaml", 3)
    assert values["batch_size"].place is None
    assert values["node.ana.name"].value == "ana" and values["node.ana.processes"].value == 2
    assert values["learning_rate"].value == 2e-05 and values["name"].text == '"m"'
    assert (values["env.MLX_LEVEL"].value, values["env.HF_TOKEN"].value) == ("1", "[redacted]")
    assert not {"iters", "recovery.max_restarts", "node.ultra.share"} & values.keys()
    every = {value.key: value for value in effective(path, every=True)}
    assert every["recovery.max_restarts"].source == "default" and every["node.ultra.share"].text == "none"


def test_what_a_plan_chooses_is_the_plans(path: Path) -> None:
    chosen = {"optimizer_precision": "kahan", "moments": "8bit", "cluster.backend": "ring", "layer_split": None}
    path.write_text('[[node]]\n[job]\nmodel = "m"\ndata = "d"\nmoments = "float32"\noptimizer_precision = "auto"\n')
    values = {value.key: (value.value, value.source) for value in effective(path, chosen=chosen)}
    assert values["optimizer_precision"] == ("kahan", "the plan")
    assert values["moments"] == ("float32", "flightdeck.toml:5")
    assert values["cluster.backend"] == ("ring", "the plan")
    assert "layer_split" not in values and values["grad_checkpoint"] == ("auto", "default")


def test_what_mlx_lms_hf_dataset_stands_for_is_of_its_line(path: Path) -> None:
    hub = 'hf_dataset = {path = "org/set", config = {name = "main", revision = "v1"}, prompt_feature = "q"}'
    path.write_text(f'[[node]]\n[job]\nmodel = "m"\ndata = "unused"\ntext_feature = "unused"\n{hub}\n')
    values = {value.key: (value.value, value.source) for value in effective(path)}
    assert {key: value for key, (value, source) in values.items() if source == "flightdeck.toml:6"} == {
        "node.node0.data": "hf:org/set@v1",
        "data": "hf:org/set@v1",
        "prompt_feature": "q",
        "data.subset": "main",
        "data.splits.train": "train[:80%]",
        "data.splits.valid": "train[-10%:]",
    }
    assert "text_feature" not in values
    values = {value.key: (value.value, value.source) for value in effective(path, {"data": "hf:org/other"})}
    assert values["data"] == ("hf:org/other", "--set") and "data.splits.train" not in values


def test_an_mlx_lm_yaml_may_name_its_hf_dataset(path: Path) -> None:
    path.with_name("lora.yaml").write_text("model: m\ntest: true\nhf_dataset:\n- path: org/set\n  test_split: test\n")
    path.write_text('[[node]]\n[job]\nconfig = "lora.yaml"\n')
    values = {value.key: (value.value, value.source) for value in effective(path)}
    assert values["data"] == ("hf:org/set", "lora.yaml:3") and values["data.splits.test"] == ("test", "lora.yaml:3")
    path.write_text('[[node]]\n[job]\nconfig = "lora.yaml"\ndata = "mine"\n')
    values = {value.key: (value.value, value.source) for value in effective(path)}
    assert values["data"] == ("mine", "flightdeck.toml:4") and "data.splits.test" not in values


def test_a_hostfiles_nodes_are_of_the_hostfile(path: Path) -> None:
    path.with_name("hosts").write_text("10.0.0.1:1\n10.0.0.2:1\n")
    path.write_text('[cluster]\nhostfile = "hosts"\n[node_defaults]\npython = "/p"\n[job]\ncommand = ["true"]\n')
    values = {value.key: value.source for value in effective(path)}
    (first, *_) = [key.rpartition(".")[0] for key in values if key.startswith("node.")]
    assert (values[f"{first}.ssh"], values[f"{first}.python"]) == ("hosts", "flightdeck.toml:4")
    assert values["command"] == "flightdeck.toml:6"


def test_faults_have_their_lines_in_both_files(path: Path) -> None:
    path.write_text(FILE.replace("every = 7", "evry = 7"))
    path.with_name("lora.yaml").write_text(YAML.replace("epochs: 2", "epochs: many\nlora_layers: 2"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = {(Path(fault.fault.file).name, fault.line, fault.text) for fault in placed(caught.value)}
    assert lines == {
        ("flightdeck.toml", 21, "evry = 7"),
        ("lora.yaml", 5, "epochs: many"),
        ("lora.yaml", 6, "lora_layers: 2"),
    }
    assert all(fault.what.startswith(fault.fault.key) for fault in placed(caught.value))


def test_a_yaml_that_has_itself_within_is_read_to_its_end(path: Path) -> None:
    path.with_name("lora.yaml").write_text("lora_parameters: &a\n  keys: [*a]\n  rank: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert 1 in [fault.line for fault in placed(caught.value)]


def test_the_configurations_of_a_folder_are_listed_the_refused_with_their_first_fault(path: Path) -> None:
    path.with_name("pyproject.toml").write_text("[project]\nname = 'x'\n")
    path.with_name("b.toml").write_text('[[node]]\n[job]\nmodel = "m"\nbatch_size = 0\nseed = -1\n')
    path.with_name("c.toml").write_text("[job]\nmodel =\n")
    files = configurations(path.parent)
    assert [(file.path.name, file.config is not None) for file in files] == [
        ("b.toml", False),
        ("c.toml", False),
        ("flightdeck.toml", True),
    ]
    assert files[0].fault.startswith("job.") and "\n" not in files[0].fault
    assert "line 2" in files[1].fault
