"""The demo's parts are made offline, once, whole or not at all, and a tiny model learns from them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.config.models import Config
from engine.demo import cache_key, demo_config
from engine.errors import InputError, LaunchError
from tests.demo_copies import demo_below


def digest(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    home = demo_below(tmp_path_factory.mktemp("demo") / "home")
    return home, demo_config(home)


def test_it_has_a_rank_on_this_machine_per_node_and_is_private(made: tuple[Path, Config]) -> None:
    home, config = made
    assert [(node.name, node.ssh, node.python) for node in config.nodes] == [
        ("node0", "127.0.0.1", sys.executable),
        ("node1", "127.0.0.1", sys.executable),
    ]
    assert config.job.mlx_lm["iters"] == 60
    assert config.job.mlx_lm["num_layers"] == -1
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_second_call_makes_nothing_again(made: tuple[Path, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    home, config = made
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert demo_config(home, ranks=1).job.model == config.job.model


def test_concurrent_calls_succeed_and_leave_one_directory_with_the_same_bytes(
    made: tuple[Path, Config], tmp_path: Path
) -> None:
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(demo_config(tmp_path).job.model)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [str(tmp_path / "demo" / cache_key() / "model")] * 2
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [cache_key()]
    home, _ = made
    assert digest(home / "demo" / cache_key()) == digest(tmp_path / "demo" / cache_key())


def test_a_failed_creation_leaves_nothing_and_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named mlx' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(LaunchError, match="No module named mlx"):
        demo_config(tmp_path / "home")
    assert list((tmp_path / "home" / "demo").iterdir()) == []


@pytest.mark.parametrize(("ranks", "iters"), [(0, 60), (9, 60), (2, 0)])
def test_impossible_numbers_are_refused(tmp_path: Path, ranks: int, iters: int) -> None:
    with pytest.raises(InputError):
        demo_config(tmp_path, ranks=ranks, iters=iters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("g++")
@pytest.mark.slow
def test_stock_mlx_lm_learns_from_it_within_a_dozen_steps(made: tuple[Path, Config], tmp_path: Path) -> None:
    """With mlx-lm's own trainer, so that this stands on nothing of ours but the demo's files."""
    _, config = made
    job = config.job.mlx_lm | {
        "iters": 12,
        "adapter_path": str(tmp_path / "adapters"),
        "steps_per_eval": 12,
        "val_batches": 1,
    }
    yaml = tmp_path / "job.yaml"
    yaml.write_text(json.dumps({key: value for key, value in job.items() if value is not None}))
    program = (
        "import json, sys\n"
        "from mlx_lm import lora\n"
        "from mlx_lm.tuner.callbacks import TrainingCallback\n"
        "class Print(TrainingCallback):\n"
        "    def on_train_loss_report(self, report): print('REPORT', json.dumps(report))\n"
        "lora.get_reporting_callbacks = lambda *a, **k: Print()\n"
        "sys.argv = ['lora', '-c', sys.argv[1]]\n"
        "lora.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(yaml)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        json.loads(line.removeprefix("REPORT "))["train_loss"]
        for line in done.stdout.splitlines()
        if line.startswith("REPORT ")
    ]
    assert losses[0] > 5.5
    assert losses[-1] < 4.0
