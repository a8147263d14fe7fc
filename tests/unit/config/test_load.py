"""A right flightdeck.toml becomes a whole configuration: defaults filled in, paths absolute, the YAML's keys in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.unit.config.documents import JOB, NODES, load


def test_the_shortest_one_has_everything_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, "[[node]]\n" + JOB)
    assert config.file == tmp_path / "flightdeck.toml"
    assert [(node.name, node.ssh, node.python, node.workdir) for node in config.nodes] == [
        ("node0", "127.0.0.1", sys.executable, str(tmp_path))
    ]
    assert config.job.name == "tiny-4B"
    assert config.nodes[0].model == str(tmp_path / "models/tiny-4B")
    assert config.nodes[0].data == str(tmp_path / "data")
    settings = config.job.mlx_lm
    assert (settings["batch_size"], settings["iters"], settings["learning_rate"]) == (4, 1000, 1e-5)
    assert (settings["train"], settings["max_grad_norm"]) == (True, None)
    assert settings["optimizer_precision"] == settings["moments"] == "auto"
    assert settings["adapter_path"] is None
    assert (config.recovery.lease_s, config.preflight.all_sum_s) == (60.0, 2.0)


def test_full_fine_tuning_trains_all_layers_and_lora_sixteen(tmp_path: Path) -> None:
    assert load(tmp_path, NODES + JOB + 'fine_tune_type = "full"').job.mlx_lm["num_layers"] == -1
    assert load(tmp_path, NODES + JOB + 'fine_tune_type = "full"\nnum_layers = 3').job.mlx_lm["num_layers"] == 3
    assert load(tmp_path, NODES + JOB).job.mlx_lm["num_layers"] == 16


def test_inline_keys_win_over_the_yaml_and_the_yaml_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/lora.yaml").write_text(
        "train: true\nlearning_rate: 1e-5\nbatch_size: 6\niters: 20\nmodel: elsewhere\n"
        "lora_parameters: {rank: 16}\noptimizer: AdamW\n"
        "lr_schedule:\n  name: cosine_decay\n  arguments: [1e-5, 1000, 1e-7]\n"
    )
    config = load(tmp_path, NODES + JOB + 'config = "conf/lora.yaml"\niters = 30\n')
    job = config.job
    assert [node.model for node in config.nodes] == [str(tmp_path / "models/tiny-4B")] * 2
    assert (job.mlx_lm["batch_size"], job.mlx_lm["iters"], job.mlx_lm["learning_rate"]) == (6, 30, 1e-5)
    assert job.mlx_lm["lora_parameters"] == {"rank": 16, "dropout": 0.0, "scale": 20.0}
    assert job.mlx_lm["optimizer"] == "adamw"
    assert job.mlx_lm["lr_schedule"]["arguments"] == [1e-5, 1000, 1e-7]


def test_epochs_win_over_the_iters_of_a_yaml_and_iters_over_its_epochs(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("iters: 600\n")
    settings = load(tmp_path, NODES + JOB + 'config = "lora.yaml"\nepochs = 3').job.mlx_lm
    assert (settings.get("iters"), settings["epochs"]) == (None, 3)
    (tmp_path / "lora.yaml").write_text("epochs: 3\n")
    settings = load(tmp_path, NODES + JOB + 'config = "lora.yaml"\niters = 30').job.mlx_lm
    assert (settings["iters"], settings.get("epochs")) == (30, None)


def test_a_null_in_the_yaml_is_a_key_not_given(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("iters: null\nseed: ~\n")
    settings = load(tmp_path, NODES + JOB + 'config = "lora.yaml"').job.mlx_lm
    assert (settings["iters"], settings["seed"]) == (1000, 0)


@pytest.mark.parametrize("text", ["2GB", "'2 gb'", "2000M", "2000000000"])
def test_a_size_in_the_yaml_is_read_as_mlx_lms_option_takes_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "lora.yaml").write_text(f"clear_cache_threshold: {text}\n")
    settings = load(tmp_path, NODES + JOB + 'config = "lora.yaml"').job.mlx_lm
    assert settings["clear_cache_threshold"] == 2 * 10**9


def test_an_empty_yaml_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("# nothing yet\n")
    assert load(tmp_path, NODES + JOB + 'config = "lora.yaml"').job.mlx_lm["iters"] == 1000


def test_home_is_expanded_and_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    monkeypatch.chdir("/")
    config = load(
        tmp_path,
        '[[node]]\nmodel = "~/m"\npython = "venv/bin/python"\nworkdir = "/abs"\n[[node]]\n'
        '[job]\nmodel = "~/models/Qwen3.5 4B"\n'
        'data = "./d"\nadapter_path = "out"\n',
    )
    node, other = config.nodes
    assert (other.model, other.data) == ("/home/ana/models/Qwen3.5 4B", str(tmp_path / "d"))
    assert config.job.name == "Qwen3-5-4B"
    assert (config.job.model, config.job.mlx_lm["adapter_path"]) == ("~/models/Qwen3.5 4B", "out")
    assert (node.model, node.python, node.workdir) == ("/home/ana/m", str(tmp_path / "venv/bin/python"), "/abs")


def test_an_interpreter_without_a_folder_is_looked_for_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python9").write_text("")
    (tmp_path / "bin/python9").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert load(tmp_path, '[[node]]\npython = "python9"\n' + JOB).nodes[0].python == str(tmp_path / "bin/python9")


def test_a_link_to_an_interpreter_stays_a_link_since_a_virtual_environment_is_one(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert load(tmp_path, '[[node]]\npython = "./python"\n' + JOB).nodes[0].python == str(tmp_path / "python")


def test_a_command_has_no_training_keys_and_is_named_after_its_script(tmp_path: Path) -> None:
    job = load(tmp_path, NODES + '[job]\ncommand = ["python", "-u", "my_script.py", "--x"]\nenv = {LEVEL = "2"}\n').job
    assert job.command == ("python", "-u", "my_script.py", "--x")
    assert (job.name, job.model, job.mlx_lm, job.env) == ("my_script", None, {}, {"LEVEL": "2"})


def test_a_command_may_have_trackers_of_the_heads_own(tmp_path: Path) -> None:
    text = NODES + '[job]\ncommand = ["python", "my_script.py"]\nproject_name = "ours"\nreport_to = "{}"\n'
    job = load(tmp_path, text.format("wandb, tensorboard")).job
    assert (job.trackers, job.mlx_lm["project_name"]) == (("tensorboard", "wandb"), "ours")
    for value, accepted in (("swanlab", "tensorboard, wandb"), ("none", "tensorboard, wandb")):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, text.format(value))
        assert [(fault.key, fault.accepted) for fault in refused.value.faults] == [("job.report_to", accepted)]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    text = (NODES + JOB).replace("\n", "\r\n").encode()
    assert len(load(tmp_path, b"\xef\xbb\xbf" + text).nodes) == 2


def test_shares_and_the_other_tables_are_taken_over(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[cluster]\nname = 'studio'\nstarting_port = 30000\n[[node]]\nshare = 3\n[[node]]\nshare = 1.5\n"
        "[recovery]\nlease_s = 10\n[preflight]\nskip = ['ports_free']\n[ui]\nascii = true\n" + JOB,
    )
    assert [node.share for node in config.nodes] == [3.0, 1.5]
    assert (config.cluster.name, config.cluster.starting_port) == ("studio", 30000)
    assert (config.recovery.lease_s, config.preflight.skip, config.ui.ascii) == (10.0, ("ports_free",), True)


REMOTE = """
[node_defaults]
python = "~/mlx/bin/python"
[[node]]
[[node]]
name = "ultra"
ssh = "ana@ultra.local:2222"
[[node]]
name = "max"
ssh = "bea@max.local"
python = "/opt/python"
workdir = "~/work"
model = "~/elsewhere"
ips = ["10.0.0.3"]
"""


def test_paths_on_another_machine_are_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/head")
    here, ultra, there = load(tmp_path, REMOTE + '[job]\nmodel = "~/models/m"\ndata = "data/d"\n').nodes
    assert (here.python, here.workdir) == ("/home/head/mlx/bin/python", str(tmp_path))
    assert (here.model, here.data) == ("/home/head/models/m", str(tmp_path / "data/d"))
    assert (ultra.python, ultra.workdir, ultra.model, ultra.data) == (
        *("~/mlx/bin/python", "~", "~/models/m", "~/data/d"),
    )
    assert (there.python, there.workdir, there.model, there.data) == (
        *("/opt/python", "~/work", "~/elsewhere", "~/work/data/d"),
    )


def test_addresses_that_are_not_given_are_left_to_the_facts_unless_all_nodes_are_here(tmp_path: Path) -> None:
    assert [node.ips for node in load(tmp_path, REMOTE + JOB).nodes] == [(), (), ("10.0.0.3",)]
    assert [node.ips for node in load(tmp_path, NODES + JOB).nodes] == [("127.0.0.1",)] * 2
    assert load(tmp_path, "[[node]]\nips = []\n" + JOB).nodes[0].ips == ("127.0.0.1",)


def test_one_host_may_carry_several_ranks_also_over_its_own_loopback(tmp_path: Path) -> None:
    node = '[[node]]\nname = "{}"\nssh = "ana@h"\npython = "/p"\nips = ["127.0.0.1"]\n'
    assert [each.ssh for each in load(tmp_path, node.format("a") + node.format("b") + JOB).nodes] == ["ana@h"] * 2


def test_an_rdma_matrix_is_read_with_empty_texts_for_null(tmp_path: Path) -> None:
    nodes = (
        '[[node]]\nname = "a"\nrdma = ["", "rdma_en5"]\n[[node]]\nname = "b"\nssh = "b.local"\npython = "/p"\n'
        'rdma = ["rdma_en4", ""]\n'
    )
    config = load(tmp_path, '[cluster]\nbackend = "jaccl"\nlauncher = "direct"\n' + nodes + JOB)
    assert [node.rdma for node in config.nodes] == [(None, "rdma_en5"), ("rdma_en4", None)]
    assert (config.cluster.backend, config.cluster.launcher) == ("jaccl", "direct")


def test_loading_writes_nothing(tmp_path: Path) -> None:
    load(tmp_path, NODES + JOB)
    assert [path.name for path in tmp_path.iterdir()] == ["flightdeck.toml"]


def test_local_training_goes_with_all_that_ends_a_training(tmp_path: Path) -> None:
    assert load(tmp_path, NODES + JOB + "strategy = 'local'").job.mlx_lm["local_steps"] == 16
    own = "local_steps = 10000\nouter_learning_rate = 2\nouter_momentum = 0\nwire = 'int8'\n"
    more = "epochs = 2\nsave_best = true\npatience = 3\ngrad_accumulation_steps = 4\n"
    job = load(tmp_path, NODES + JOB + "strategy = 'local'\n" + own + more).job
    assert (job.strategy, job.mlx_lm["local_steps"], job.mlx_lm["wire"]) == ("local", 10_000, "int8")
    assert (job.mlx_lm["outer_learning_rate"], job.mlx_lm["outer_momentum"]) == (2, 0)


def test_mlxs_own_variables_can_be_set_but_for_those_that_a_launch_sets(tmp_path: Path) -> None:
    own = {"MLX_METAL_FAST_SYNCH": "1", "MLX_MAX_OPS_PER_BUFFER": "8", "MLX_JACCLX": "as it is"}
    table = ", ".join(f"{name} = '{value}'" for name, value in own.items())
    assert load(tmp_path, "[[node]]\n" + JOB + f"env = {{{table}}}\n").job.env == own
    # As mlx.distributed_config writes it.
    hosts = {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [{"ssh": "127.0.0.1"}]}
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    imported = load(tmp_path, "[cluster]\nhostfile = 'hosts.json'\n" + JOB)
    assert imported.job.env == {"MLX_METAL_FAST_SYNCH": "1"}


def test_a_node_is_kept_out_of_validation(tmp_path: Path) -> None:
    nodes = "[[node]]\nvalidate = false\n[[node]]\nvalidate = true\n[[node]]\n"
    assert [node.validates for node in load(tmp_path, nodes + JOB).nodes] == [False, True, None]


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 1e-5 * 32**0.5), ("sgd", 1e-3 * 32 / 64)])
def test_a_learning_rate_is_chosen_by_the_rule_for_all_that_an_update_sees(
    tmp_path: Path, optimizer: str, rate: float
) -> None:
    keys = f"optimizer = '{optimizer}'\nbatch_size = 8\ngrad_accumulation_steps = 4\n"
    job = load(tmp_path, "[[node]]\n" + JOB + keys + "learning_rate = 'auto'\n").job
    assert job.mlx_lm["learning_rate"] == pytest.approx(rate) and job.rate_by_rule
    assert not load(tmp_path, "[[node]]\n" + JOB + keys).job.rate_by_rule
    by_tokens = load(tmp_path, "[[node]]\n" + JOB + "batch_tokens = 512\nlearning_rate = 'auto'\n").job
    assert by_tokens.mlx_lm["learning_rate"] == "auto" and not by_tokens.rate_by_rule, "the trainer counts sequences"


def test_a_batch_is_of_sequences_or_of_tokens(tmp_path: Path) -> None:
    job = load(tmp_path, "[[node]]\n[[node]]\n" + JOB + "batch_tokens = 512\n").job
    assert job.mlx_lm["batch_tokens"] == 512 and "batch_size" not in job.mlx_lm
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[[node]]\n" + JOB + "batch_size = 8\nbatch_tokens = 512\n")
    assert [str(fault) for fault in caught.value.faults] == [str(caught.value)]
    assert "batch_tokens = 512: expected no value here: batch_size is set, and it is one or the other" in str(
        caught.value
    )
