"""[job] framework = "torch": its strategies, keys, processes and commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load_config
from engine.config.models import Config
from engine.errors import ConfigError
from engine.protocol.launchers import (
    LAUNCHERS,
    idle_options,
    nested_in_command,
    nested_launcher,
    option_value,
    rank_command,
    split_launcher,
    started_program,
    with_settings,
)

NODES = '[[node]]\nname = "box"\nssh = "ana@box"\npython = "/venv/bin/python"\nprocesses = 2\n[[node]]\nname = "here"\n'
OWN = NODES + '[job]\nframework = "torch"\ncommand = ["accelerate", "launch", "t.py"]\n'
ELASTIC = '[job]\nframework = "torch"\ncommand = ["torchrun", "t.py"]\nelastic = true\n'
TRAINING = '[job]\nframework = "torch"\nmodel = "/m"\ndata = "/d"\n'


def command(*words: str) -> str:
    return f'{NODES}[job]\nframework = "torch"\ncommand = {json.dumps(words)}\n'


def loaded(folder: Path, text: str) -> Config:
    file = folder / "flightdeck.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        loaded(folder, text)
    return [f"{fault.key}: {fault.accepted}" for fault in error.value.faults]


def test_the_framework_is_one_key_and_the_rest_stays_as_it_is(tmp_path: Path) -> None:
    text = '[[node]]\nname = "here"\n[job]\nmodel = "/m"\ndata = "/d"\nwire = "float32"\nprecision = "bf16"\n'
    mlx, torch = loaded(tmp_path, text), loaded(tmp_path, text + 'framework = "torch"\n')
    assert (mlx.job.strategy, torch.job.strategy) == ("data", "auto")
    assert (mlx.job.unused, torch.job.unused) == (("precision",), ("wire",))
    assert (mlx.job.mlx_lm["wire"], torch.job.mlx_lm["precision"]) == ("float32", "bf16")
    assert "precision" not in mlx.job.mlx_lm and "wire" not in torch.job.mlx_lm
    assert torch.starts_directly and not mlx.starts_directly


def test_a_key_of_the_strategy_local_is_unused_with_torch(tmp_path: Path) -> None:
    text = '[[node]]\n[job]\nmodel = "/m"\ndata = "/d"\nframework = "torch"\nlocal_steps = 4\n'
    assert loaded(tmp_path, text).job.unused == ("local_steps",)


@pytest.mark.parametrize("job", [TRAINING, '[job]\nmodel = "/m"\ndata = "/d"'], ids=["torch", "mlx"])
def test_each_process_of_a_node_is_a_node(job: str, tmp_path: Path) -> None:
    nodes = loaded(tmp_path, NODES + job).nodes
    assert [(node.name, node.ssh) for node in nodes] == [
        ("box.0", "ana@box"),
        ("box.1", "ana@box"),
        ("here", "127.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[[node]]\nname = "a"\nssh = "b"\n' + TRAINING, "node[0].python: the interpreter that has torch"),
        (NODES + TRAINING + 'strategy = "data"', "job.strategy: one of 'auto', 'ddp', 'fsdp', 'deepspeed', or"),
        (NODES + TRAINING + 'optimizer = "muon"', "job.optimizer: one of adam, adamw, sgd with PyTorch"),
        (NODES + TRAINING + 'report_to = "swanlab"', "job.report_to: no swanlab"),
        (NODES + TRAINING + 'report_to = "mlflow"', "job.report_to: tensorboard, wandb, swanlab, or several"),
        (NODES + TRAINING + 'offload = "nvme"', "job.nvme_path: a folder on every node"),
        (NODES + TRAINING + 'offload = "nvme"\nnvme_path = "/n"', "checkpoint.enabled: false: of what is offloaded"),
        (NODES + TRAINING + "zero_stage = 4", 'job.zero_stage: 1, 2, 3 or "auto"'),
        (NODES + TRAINING + '[cluster]\nbackend = "ring"', "cluster.backend: auto, nccl or gloo"),
        (
            NODES.replace("processes", 'rdma = ["", "rdma_en5"]\nprocesses') + '[job]\nmodel = "/m"\ndata = "/d"',
            "node[0].processes: no value here, with rdma: one [[node]] for each rank",
        ),
        (NODES + '[job]\nframework = "jax"\nmodel = "/m"\ndata = "/d"', "job.framework: "),
        (NODES + '[job]\nframework = "torch"\nscript = "t.py"\ncommand = ["t"]', "job.script: no value here"),
        (NODES + '[job]\nframework = "torch"\nscript = ""', "job.script: a script and its arguments"),
        (
            NODES + '[job]\nframework = "torch"\ncommand = ["torchrun", "--nproc_per_node", "2", "t.py"]',
            "job.command: no --nproc_per_node: Flight Deck starts a rank for each [[node]] and its processes itself",
        ),
        (NODES + '[job]\nframework = "torch"\ncommand = ["accelerate", "launch"]', "job.command: a script after"),
        (OWN + 'report_to = "swanlab"', "job.report_to: tensorboard, wandb"),
        (OWN + "zero_stage = 9", 'job.zero_stage: 1, 2, 3 or "auto"'),
        (OWN + 'offload = "moon"', "job.offload: "),
        (OWN + 'precision = "int4"', "job.precision: "),
        (OWN + 'offload = "nvme"', "job.nvme_path: a folder on every node"),
        (
            NODES + '[job]\nframework = "torch"\ncommand = ["torchrun", "--mixed_precision", "bf16", "t.py"]',
            "job.command: no --mixed_precision: torchrun has no such option",
        ),
        (
            NODES + '[job]\nframework = "torch"\ncommand = ["torchrun", "--no-python", "./t.sh"]',
            "job.command: no --no_python: write the program alone, without the launcher",
        ),
        (
            NODES + '[job]\nframework = "torch"\ncommand = ["deepspeed", "-m", "train"]',
            "job.command: no -m: write --module, as deepspeed has it",
        ),
        (
            NODES
            + '[job]\nframework = "torch"\nprecision = "fp16"\n'
            + 'command = ["accelerate", "launch", "--mixed_precision", "bf16", "t.py"]',
            "job.precision: 'bf16', as the command's --mixed_precision",
        ),
        (
            NODES + '[job]\nframework = "torch"\ncommand = ["python", "-m", "torch.distributed.launch", "t.py"]',
            'job.command: "torchrun": torch.distributed.launch',
        ),
        (command("torchrun", "--max-restarts=3", "t.py"), "job.command: no --max_restarts: max_restarts and restart_"),
        (command("torchrun", "--rdzv-ba", "c10d", "t.py"), "job.command: no --rdzv_backend: the ranks meet at"),
        (command("torchrun", "--log", "x", "t.py"), "job.command: no --log: it stands for --log_dir, --logs_specs"),
        (command("deepspeed", "--bind_cores_to_rank", "t.py"), "job.command: no --bind_cores_to_rank: ranks are not"),
        (command("deepspeed", "--include", "a:0", "t.py"), "job.command: no --include: Flight Deck starts a rank for"),
        (command("accelerate", "launch", "--tpu", "t.py"), "job.command: no --tpu: TPUs are not served"),
        (command("accelerate", "launch", "--fsdp", "t.py"), "job.command: no --fsdp: accelerate has no such option"),
        (
            command("accelerate", "launch", "--use_fsdp", "t.py") + 'strategy = "ddp"',
            "job.strategy: no value here: the command has --use_fsdp",
        ),
        (command("uv", "run", "torchrun", "t.py") + "elastic = true", "job.elastic: false, or a command that begins"),
        (NODES + TRAINING + '[checkpoint]\ndestination = "s3://bucket/x"', "checkpoint.destination: a folder with"),
        (
            NODES.replace("processes = 2", "") + ELASTIC + "[recovery]\nmax_restarts = 0\nmin_nodes = 1",
            "recovery.max_restarts: 1 or more",
        ),
        (NODES + TRAINING + 'logging_dir = "logs"', 'job.logging_dir: no value here: it is for framework = "torch"'),
    ],
)
def test_a_fault_says_what_is_accepted(tmp_path: Path, text: str, fault: str) -> None:
    found = faults(tmp_path, text)
    assert any(each.startswith(fault) for each in found), found


def test_a_script_is_a_short_command(tmp_path: Path) -> None:
    config = loaded(tmp_path, NODES + "[job]\nframework = 'torch'\nscript = 'train.py --name \"a b\"'")
    assert config.job.command == ("python", "train.py", "--name", "a b")


@pytest.mark.parametrize("option", ["--config_file=c.yaml", "--config-file=c.yaml", "--mixed-precision=bf16"])
def test_an_option_is_written_as_its_tool_takes_it(tmp_path: Path, option: str) -> None:
    command = f'command = ["accelerate", "launch", "{option}", "--module", "train"]'
    job = loaded(tmp_path, f'{NODES}[job]\nframework = "torch"\n{command}').job
    assert job.command == ("accelerate", "launch", option, "--module", "train")


def test_a_refused_option_without_a_value_does_not_hide_the_script(tmp_path: Path) -> None:
    assert faults(tmp_path, command("torchrun", "--standalone", "--nproc-per-node=2", "train.py")) == [
        f"job.command: no {option}: Flight Deck starts a rank for each [[node]] and its processes itself"
        for option in ("--standalone", "--nproc_per_node")
    ]


def test_a_script_may_begin_with_a_launcher(tmp_path: Path) -> None:
    config = loaded(tmp_path, NODES + "[job]\nframework = 'torch'\nscript = 'torchrun -m train --lr 1'")
    assert config.job.command == ("torchrun", "-m", "train", "--lr", "1")


def test_flight_deck_takes_the_place_of_a_launcher() -> None:
    assert split_launcher(["accelerate", "launch", "--config_file", "c.yaml", "-m", "train", "--x"]) == (
        "accelerate",
        ["--config_file", "c.yaml", "--module", ""],
        ["train", "--x"],
    )
    of_rank = [
        (["torchrun", "t.py", "--lr", "1"], ["python", "t.py", "--lr", "1"]),
        (["torchrun", "-m", "pkg.train"], ["python", "-m", "pkg.train"]),
        (["deepspeed", "t.py", "--x"], ["python", "t.py", "--local_rank=3", "--x"]),
        (["accelerate", "launch", "t.py"], ["python", "/launch.py", "t.py"]),
        (["./own", "--flag"], ["./own", "--flag"]),
        (["/venv/bin/torchrun", "t.py"], ["python", "t.py"]),
        (["python3", "-u", "-m", "torch.distributed.run", "t.py"], ["python", "t.py"]),
        (["python3", "-m", "torch.distributed.run", "t.py"], ["python", "t.py"]),
        (["accelerate-launch", "-m", "t"], ["python", "/launch.py", "--module", "t"]),
        (["torchrun", "--tee", "3", "--log-dir", "logs", "--role=r", "t.py"], ["python", "t.py"]),
        (["torchrun", "-r3", "--", "t.py", "--", "x"], ["python", "t.py", "--", "x"]),
        (["deepspeed", "--no_local_rank", "t.py"], ["python", "t.py"]),
        (["deepspeed", "--no_local", "--log_level=debug", "t.py"], ["python", "t.py"]),
        (["uv", "run", "--extra", "x", "torchrun", "-m", "t"], ["uv", "run", "--extra", "x", "python", "-m", "t"]),
        (["env", "A=1", "deepspeed", "t.py"], ["env", "A=1", "{python}", "t.py", "--local_rank=3"]),
        (
            ["poetry", "run", "accelerate", "launch", "--cpu", "t.py"],
            ["poetry", "run", "python", "/launch.py", "--cpu", "t.py"],
        ),
        (["python", "-m", "own.run", "t.py"], ["python", "-m", "own.run", "t.py"]),
    ]
    assert [rank_command(given, 3, "/launch.py") for given, _ in of_rank] == [expected for _, expected in of_rank]
    assert started_program(["accelerate", "launch", "--mixed_precision", "bf16", "t.py"]) == ["python", "t.py"]


LAUNCH = ["accelerate", "launch"]


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"strategy": "auto"}, []),
        ({"strategy": "ddp", "precision": "bf16"}, ["--mixed_precision=bf16"]),
        (
            {"strategy": "fsdp", "sharding": "grad_op", "offload": "cpu", "precision": "fp32"},
            [
                "--use_fsdp",
                "--fsdp_version=2",
                "--fsdp_reshard_after_forward=false",
                "--fsdp_offload_params=true",
                "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
                "--fsdp_state_dict_type=SHARDED_STATE_DICT",
                "--mixed_precision=no",
            ],
        ),
        (
            {"strategy": "deepspeed", "zero_stage": "auto"},
            ["--use_deepspeed", "--zero_stage=2", "--offload_optimizer_device=none"],
        ),
        (
            {"strategy": "deepspeed", "zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"},
            [
                "--use_deepspeed",
                "--zero_stage=3",
                "--offload_optimizer_device=nvme",
                "--offload_param_device=nvme",
                "--zero3_init_flag=true",
                "--offload_optimizer_nvme_path=/nvme",
                "--offload_param_nvme_path=/nvme",
            ],
        ),
    ],
    ids=["auto", "ddp", "fsdp", "zero-2", "zero-3"],
)
def test_accelerate_launch_is_given_what_the_job_asks(keys: dict[str, Any], options: list[str]) -> None:
    command = with_settings([*LAUNCH, "t.py", "--lr", "1"], keys["strategy"], keys)
    assert command == [*LAUNCH, *options, "t.py", "--lr", "1"]
    assert rank_command(command, 0, "/launch.py") == ["python", "/launch.py", *options, "t.py", "--lr", "1"]


@pytest.mark.parametrize(
    "command",
    [["torchrun", "t.py"], [*LAUNCH, "--config_file", "c.yaml", "t.py"], [*LAUNCH, "--config-file=c.yaml", "t.py"]],
)
def test_other_commands_have_their_own_settings(command: list[str]) -> None:
    assert with_settings(command, "fsdp", {"strategy": "fsdp", "precision": "bf16"}) == command


def test_a_precision_named_in_the_command_stays() -> None:
    command = [*LAUNCH, "--mixed-precision=fp8", "t.py"]
    assert with_settings(command, "ddp", {"precision": "bf16"}) == [*LAUNCH, "--mixed_precision=fp8", "t.py"]


def test_the_keys_of_an_accelerate_script_are_kept(tmp_path: Path) -> None:
    text = NODES + '[job]\nframework = "torch"\ncommand = ["accelerate", "launch", "t.py"]\nprecision = "bf16"'
    job = loaded(tmp_path, text).job
    assert (job.strategy, job.mlx_lm["precision"], job.mlx_lm["zero_stage"]) == ("auto", "bf16", "auto")


def test_checkpoints_that_are_off_may_have_any_destination(tmp_path: Path) -> None:
    text = NODES + TRAINING + '[checkpoint]\nenabled = false\ndestination = "s3://bucket/x"\ncompression = "zstd"'
    assert loaded(tmp_path, text).checkpoint.compression == "zstd"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "-m", "mlx_lm", "lora", "-c", "x.yaml"], "mlx_lm"),
        (["python3.12", "-u", "-m", "mlx_lm.lora", "--train"], "mlx_lm-lora"),
        (["torchrun", "-m", "pkg.train", "configs/small.py"], "pkg-train"),
        (["accelerate", "launch", "--use_fsdp", "src/train.py", "-m", "x"], "train"),
        (["uv", "run", "python", "-m", "own.main"], "own-main"),
        (["bash", "scripts/run.sh"], "run"),
        (["trl", "sft", "--model", "m.py.bin"], "trl"),
        (["mlx_lm.lora", "--train"], "mlx_lm-lora"),
        (["./own", "-m", "x"], "own"),
    ],
)
def test_a_run_is_named_after_its_script_module_or_program(tmp_path: Path, words: list[str], name: str) -> None:
    assert loaded(tmp_path, command(*words)).job.name == name


def test_options_without_an_effect_say_so_once_for_each_reason() -> None:
    words = ["torchrun", "--tee=3", "-r", "3", "--monitor-interval", "1", "--role", "r", "t.py"]
    logs, own = idle_options(words)
    assert logs == "--tee, --redirects: no effect, Flight Deck keeps every rank's log, see flightdeck logs"
    assert own.startswith("--monitor_interval: no effect, it concerns the launcher's own process")
    assert option_value(words, "--role") == "r" and idle_options(["python", "t.py"]) == []


@pytest.mark.parametrize("option", ["--use_fsdp", "--use_deepspeed", "--multi_gpu", "--cpu"])
def test_a_strategy_named_in_the_command_stays(option: str) -> None:
    given = [*LAUNCH, option, "t.py"]
    assert with_settings(given, "fsdp", {"precision": "bf16"}) == [*LAUNCH, "--mixed_precision=bf16", option, "t.py"]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("torchrun --standalone t.py", ("torchrun", True)),
        ("#!/bin/bash\nset -e\ncd x && \\\n  exec torchrun \\\n    --nproc_per_node=2 t.py\n", ("torchrun", True)),
        ("torchrun --nnodes 2 --rdzv-endpoint=h:1 t.py", ("torchrun", False)),
        ("python -uB -m torch.distributed.launch t.py", ("python -m torch.distributed.launch", True)),
        ("torchrun --nnodes $WORLD_SIZE --node-rank=$RANK --master-addr $MASTER_ADDR t.py", None),
        ("sh -c 'cd x; A=1 /venv/bin/deepspeed t.py'", ("deepspeed", True)),
        ("uv run fabric run t.py", ("fabric run", True)),
        ("python3 -m torch.distributed.launch --nproc_per_node=2 t.py", ("python -m torch.distributed.launch", True)),
        ("if true; then mpirun -np 2 python t.py; fi", ("mpirun", True)),
        ("accelerate launch t.py", ("accelerate launch", False)),
        ("accelerate launch --num_processes 4 t.py", ("accelerate launch", True)),
        ("trl sft --model_name_or_path m", ("trl", False)),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config c", ("tune run", True)),
        ("tune run full_finetune_distributed --config c", ("tune run", False)),
        ("FORCE_TORCHRUN=1 llamafactory-cli train c.yaml", ("llamafactory-cli", True)),
        ("# torchrun t.py\necho torchrun; command -v torchrun >/dev/null\ntorchrun --version\npython t.py", None),
    ],
)
def test_a_launcher_inside_is_found_and_known_to_be_certain_or_not(script: str, found: tuple[str, bool] | None) -> None:
    nested = nested_launcher(script)
    assert (nested and (nested.name, nested.certain)) == found, nested


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_commands_own_launcher_is_no_nested_one_but_with_mlx(name: str) -> None:
    words = ["env", "A=1", *LAUNCHERS[name], "t.py"]
    assert nested_in_command(words, "torch") is None
    assert nested_in_command(words, "mlx") is not None


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=6), st.sampled_from([*LAUNCHERS]))
def test_any_words_are_a_command(words: list[str], launcher: str) -> None:
    given_words = [*LAUNCHERS[launcher], *words]
    found, options, program = split_launcher(given_words)
    assert found == launcher and len(options) % 2 == 0
    assert given_words[len(given_words) - len(program) :] == program
    rank_command(given_words, 0, "/l.py")
    nested_launcher(shlex.join(given_words) + " ".join(words))
