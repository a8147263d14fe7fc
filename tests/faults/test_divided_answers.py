"""What a run has trained over ranks of this machine, each with a part of the model, is asked by a command over the same
ranks: by mlx.launch on a ring, it says in 200 tokens what stock mlx-lm says, and no rank holds more than its part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.models import RunState
from engine.task_result import Text
from tests.conftest import FLIGHTDECK
from tests.faults.local_runs import start_config
from tests.training.generation_cases import LARGE, LORA, PROMPTS, Trained, make_trained, stock
from tests.training.tiny import make_tiny

pytestmark = [pytest.mark.busy, pytest.mark.slow]

TOKENS = 200
LIMIT_S = 1200.0
TOKENIZER = "tokenizer_config.json"
KEYS = {"num_layers": -1, "lora_parameters": LORA, "learning_rate": 1e-2, "batch_size": 4, "iters": 4, "val_batches": 0}


def training(trained: Trained, strategy: Any, ranks: int) -> Config:
    model, data = str(trained.model), str(trained.job["data"])
    keys = {"model": model, "data": data, "fine_tune_type": "lora", "max_seq_length": 64, **KEYS}
    job = JobConfig(
        name="divided", model=model, data=data, fine_tune_type="lora", strategy=strategy, mlx_lm=with_defaults(keys)
    )
    workdir = str(trained.model.parent)
    nodes = [NodeConfig(name=f"n{rank}", python=sys.executable, workdir=workdir) for rank in range(ranks)]
    return Config(cluster=ClusterConfig(name="divided", backend="ring"), nodes=tuple(nodes), job=job)


@pytest.mark.parametrize(
    ("kind", "strategy", "ranks"),
    [
        ("llama", "sharded", 2),
        ("llama", "pipeline", 4),
        ("qwen3_moe", "pipeline", 2),
        ("qwen3_moe", "sharded", 4),
        ("ministral3", "sharded", 2),
        ("ministral3", "pipeline", 4),
    ],
)
def test_trained_in_parts_it_answers_as_one_rank_with_the_whole(
    kind: str, strategy: str, ranks: int, home: Path, tmp_path: Path
) -> None:
    """Greedy, in float32; stock mlx-lm has the base, then base and adapter as they were fetched."""

    def command(*arguments: str) -> Any:
        argv = [str(FLIGHTDECK), arguments[0], run.dir.id, *arguments[1:], "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    tiny = make_tiny(tmp_path / "tiny")
    base = make_trained(tiny, tmp_path / "base", LARGE[kind])
    # A text that is trained on ends with a token; of what is asked below, none ends an answer.
    endless = shutil.copy(base.model / TOKENIZER, tmp_path)
    shutil.copy(tiny.model / TOKENIZER, base.model)
    run = start_config(home, training(base, strategy, ranks))
    assert run.ended(LIMIT_S).state is RunState.SUCCEEDED, run.troubles()
    shutil.copy(endless, base.model)
    adapter = Path(command("fetch", str(tmp_path / "adapter"))["folder"])

    document = command("generate", "--prompt", PROMPTS[1], "--compare", "--raw", "--max-tokens", str(TOKENS))
    results, expected = document["task_results"], stock(Trained(base.model, adapter, {}), TOKENS).texts[1::2]
    assert document["world_size"] == ranks and {result["tokens"] for result in results} == {TOKENS}
    assert [result["text"] for result in results] == [*map(TypeAdapter[str](Text).validate_python, expected)]
    assert expected[0] != expected[1]

    whole = (base.model / "model.safetensors").stat().st_size
    share = round(results[-1]["peak_memory_bytes"] * ranks / whole, 3)
    rates = [round(result["tokens_per_second"], 1) for result in results]
    print(f"{kind}, {strategy}: {whole / 2**20:.0f} MiB, {ranks} ranks: at most {share} of a share, {rates} tokens/s")
    assert share <= 1.15
