"""Metrics of a user's program, read from its output or from its tracker's files."""

from __future__ import annotations

import io
import itertools
import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from engine.node.script_metrics import PrintedMetrics, TensorBoardMetrics
from engine.protocol.events import EventWriter
from tests.data import DATA
from tests.needs import RECORDINGS, TORCH
from tests.waiting import wait_until


def events_of(folder: Path, *chunks: bytes, elastic: bool = False, pattern: str | None = None) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    metrics = PrintedMetrics(EventWriter(path, 0, 1), elastic=elastic, pattern=pattern)
    for chunk in chunks:
        metrics.feed(chunk)
    return rows_of(path)


def read(folder: Path, output: str, pattern: str | None = None) -> list[tuple[int, float | None, float | None]]:
    """(iteration, training loss, iterations in all) of each report, and (iteration, None, loss) of each validation."""
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    metrics = PrintedMetrics(EventWriter(path, 0, 1), elastic=False, pattern=pattern)
    metrics.feed(output.encode())
    metrics.finish()
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["event"] in ("report", "validation")]
    return [(row["iteration"], row.get("train_loss"), row.get("val_loss", row.get("iterations"))) for row in rows]


def rows_of(path: Path) -> list[dict[str, Any]]:
    named = ("event", "iteration", "train_loss", "val_loss", "learning_rate", "iterations_per_second")
    rows = map(json.loads, path.read_text().splitlines())
    return [{name: row[name] for name in named if name in row} for row in rows]


def test_a_json_object_with_a_step_is_a_report(tmp_path: Path) -> None:
    line = json.dumps({"step": 20, "loss": 1.25, "lr": 1e-4}).encode()
    assert events_of(tmp_path, b"epoch 1\n" + line[:9], line[9:] + b"\n", b'{"step": 20, "val_loss": 2.5}\n') == [
        {"event": "step", "iteration": 20},
        {"event": "report", "iteration": 20, "train_loss": 1.25, "learning_rate": 1e-4},
        {"event": "validation", "iteration": 20, "val_loss": 2.5},
    ]


@pytest.mark.parametrize("size", [1, 100, 1 << 16])
def test_the_trainers_logs_have_the_steps_of_its_own_progress_bar(tmp_path: Path, size: int) -> None:
    """Output of transformers 5.23.0: 6 steps, a log after every 2, an evaluation, with a bar of its own, after every
    3. The bar of a step may be older than its log."""
    output = (DATA / "trainer_output.txt").read_bytes()
    found = events_of(tmp_path, *(output[at : at + size] for at in range(0, len(output), size)))
    rows = [(row["event"], row["iteration"], row.get("train_loss", row.get("val_loss"))) for row in found]
    assert [row for row in rows if row[0] != "step"] == [
        ("report", 2, 3.024),
        ("validation", 3, 3.022),
        ("report", 4, 3.022),
        ("report", 6, 3.022),
        ("validation", 6, 3.021),
    ]


@pytest.mark.parametrize(
    "bar", [b"\r %2d%%|##  | %d/200 [00:01<00:20, 9.1it/s]", b"\rMap: %2d%%|##| %d/500 [00:01<00:00]\x1b[A"]
)
def test_a_bar_of_whatever_kind_is_activity_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bytes
) -> None:
    """That a script goes through its data is not an iteration."""
    monkeypatch.setattr("engine.node.script_metrics._ACTIVITY_EVERY_S", 0.0)
    found = events_of(tmp_path, *[bar % (step // 2, step) for step in (1, 2)], b"\r")
    assert found == [{"event": "activity"}] * 2


def test_beside_a_tracker_the_output_is_activity_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.node.script_metrics._ACTIVITY_EVERY_S", 0.0)
    metrics = PrintedMetrics(EventWriter(tmp_path / "events", 0, 1), elastic=False, activity_only=True)
    metrics.feed(b'{"step": 1, "loss": 1.0}\r 10%|#  | 2/20 [00:01<00:09, 1.0it/s]\r')
    assert rows_of(tmp_path / "events") == [{"event": "activity"}]


def test_other_bars_than_the_trainings_have_no_steps(tmp_path: Path) -> None:
    """That of the tokenizer, of the files of a checkpoint, of the evaluation."""
    bars = b"Map: 100%|##| 500/500 [00:01<00:00]\r\rWriting model shards: 100%|##| 1/1 [00:00<00:00]\r"
    bars += b"\n100%|##| 2/2 [00:00<00:00, 6.30it/s]\x1b[A\r"
    assert [row["iteration"] for row in events_of(tmp_path, bars + b"{'loss': '2.5'}\n")] == [1, 1]


def test_without_a_bar_logs_are_counted(tmp_path: Path) -> None:
    found = events_of(tmp_path, b"{'loss': 2.0}\n{'loss': 1.0}\n")
    assert [row["iteration"] for row in found if row["event"] == "report"] == [1, 2]


def test_of_an_elastic_job_the_worker_of_rank_0_counts(tmp_path: Path) -> None:
    chunk = b'[rank 1] {"step": 1, "loss": 9}\n[rank 0] {"step": 1, "loss": 3}\n{"step": 2, "loss": 4}\n'
    found = events_of(tmp_path, chunk, elastic=True)
    assert [row["train_loss"] for row in found if row["event"] == "report"] == [3]


def test_a_worker_may_write_into_the_line_of_another_one(tmp_path: Path) -> None:
    bar = b"[rank 1]  10%|#  | 3/30 [00:00<00:01, 30it/s]"
    chunk = bar + b'[rank 0] {"step": 5, "loss": 0.5}\n[rank 0] {"step": 6, "loss": 0.25}' + bar + b"\n"
    found = events_of(tmp_path, chunk, elastic=True)
    assert [row["train_loss"] for row in found if row["event"] == "report"] == [0.5, 0.25]


@pytest.mark.parametrize(
    "text",
    [
        b'{"loss": "nan and more", "step": 1}',
        b'{"step": 1}',
        b"{" * 3000,
        b"[1, 2]",
        b"{'a': __import__('os').getcwd()}",
        b'{"step": 1, "loss": 1' + b" " * 5000 + b"}",
        b'{"loss": true, "step": 1}',
    ],
    ids=range(7),
)
def test_other_output_is_no_metric(tmp_path: Path, text: bytes) -> None:
    assert events_of(tmp_path, text + b"\n") == []


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_output_harms(chunks: list[bytes]) -> None:
    metrics = PrintedMetrics(EventWriter(None, 0, 1), elastic=False)
    for chunk in chunks:
        metrics.feed(chunk)


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    found = events_of(tmp_path, *[b"x" * 65_536] * 20, b'\n{"step": 3, "loss": 1.0}\n')
    assert [row["iteration"] for row in found] == [3, 3]


def bar(step: int, total: int, loss: float | None = None, head: str = "", tail: str = "") -> str:
    """As tqdm draws it."""
    postfix = f", {tail}loss={loss}" if loss is not None else ""
    return f"\r{head} {100 * step // total:3d}%|###   | {step}/{total} [00:03<01:00,  3.10it/s{postfix}]"


def test_a_message_behind_the_trainers_bar_does_not_move_its_log_to_the_next_step(tmp_path: Path) -> None:
    """With log_level="info" the Trainer prints one where the evaluation begins."""
    log = "\r{'loss': '1.384', 'epoch': '4.766'}\r\n"
    message = "[INFO|trainer.py:1207] 2026-01-02 10:00:00,000 >> ***** Running Evaluation *****\n"
    output = bar(300, 384) + log + bar(320, 384) + message + bar(325, 384) + log + bar(340, 384)
    assert read(tmp_path, output) == [(320, 1.384, 384), (340, 1.384, 384)]


def test_the_trainers_last_log_needs_no_bar_behind_it(tmp_path: Path) -> None:
    assert read(tmp_path, bar(20, 20) + "\r{'loss': '1.5'}\n") == [(20, 1.5, 20)]


def test_a_bar_with_a_loss_is_read_with_its_total(tmp_path: Path) -> None:
    assert read(tmp_path, bar(10, 200, 1.23) + bar(10, 200, 1.22) + bar(20, 200, 1.1, tail="lr=1e-4, ")) == [
        (10, 1.23, 200),
        (20, 1.1, 200),
    ]
    assert read(tmp_path, "\rloss 1.25, lr 1e-4:  5%|#  | 10/200 [00:03<01:00,  3.10it/s]") == [(10, 1.25, 200)]


def set_after(progress: Any, losses: list[float]) -> None:
    for loss in losses:
        progress.update(1)
        progress.set_postfix(loss=loss)


def set_before(progress: Any, losses: list[float]) -> None:
    for _, loss in zip(progress, losses, strict=True):
        progress.set_postfix(loss=loss)


def described(progress: Any, losses: list[float]) -> None:
    for loss in losses:
        progress.set_description(f"loss {loss}")
        progress.update(1)


def drawn_with_the_count(progress: Any, losses: list[float]) -> None:
    for loss in losses:
        progress.set_postfix(loss=loss, refresh=False)
        progress.update(1)


@pytest.mark.parametrize("trains", [set_after, set_before, described, drawn_with_the_count])
@pytest.mark.parametrize("losses", [[2.5, 2.25, 2.0, 1.75], [2.0, 2.0, 1.5, 1.5, 1.5]])
@pytest.mark.parametrize("epochs", [1, 3])
def test_losses_of_a_bar_are_of_the_steps_that_they_were_set_for(
    tmp_path: Path, trains: Callable[[Any, list[float]], None], losses: list[float], epochs: int
) -> None:
    """By the real tqdm, which draws a bar when its count is raised and when a loss is set."""
    output = io.StringIO()
    for epoch in range(epochs):
        with tqdm(range(len(losses)), file=output, mininterval=0, desc=f"Epoch {epoch}") as progress:
            trains(progress, [loss - epoch for loss in losses])
    expected = [loss - epoch for epoch in range(epochs) for loss in losses]
    assert [row[:2] for row in read(tmp_path, output.getvalue())] == list(enumerate(expected, 1))


def test_a_bar_that_begins_a_new_epoch_has_no_loss_of_its_own(tmp_path: Path) -> None:
    """Lightning's: the bar is set back before its name changes."""
    heads = [("Epoch 0: ", 0, None), ("Epoch 0: ", 1, None), ("Epoch 0: ", 1, 3.0), ("Epoch 0: ", 2, 3.0)]
    heads += [("Epoch 0: ", 2, 2.0), ("Epoch 0: ", 0, 2.0), ("Epoch 1: ", 0, 2.0), ("Epoch 1: ", 1, 2.0)]
    drawn = [bar(step, 2, loss, head, "train_") for head, step, loss in [*heads, ("Epoch 1: ", 1, 1.0)]]
    assert [row[:2] for row in read(tmp_path, "".join(drawn))] == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ([0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]),
        ([0, 10, 20, 0, 10], [0, 10, 20, 30, 40]),
        ([0, 10, 20, 24, 0, 10], [0, 10, 20, 24, 25, 35]),
        ([10, 20, 24, 10, 20], [10, 20, 24, 34, 44]),
    ],
)
def test_steps_that_begin_with_0_in_each_epoch_are_told_apart(
    tmp_path: Path, printed: list[int], expected: list[int]
) -> None:
    epoch, lines = 1, []
    for before, step in itertools.pairwise([0, *printed]):
        epoch += step < before
        lines.append(f"[RANK0] Epoch {epoch} | Iter {step} | Train Loss {step}.5\n")
    assert [step for step, _, _ in read(tmp_path, "".join(lines))] == expected


def test_steps_of_lightnings_bar_count_over_its_epochs(tmp_path: Path) -> None:
    """Also of a run that was resumed in epoch 2: they are counted from the beginning of the training."""

    def epoch(number: int) -> str:
        bars = (
            bar(step, 40, loss, f"Epoch {number}: ", "v_num=0, train_")
            for step, loss in ((0, 9.0), (20, 8.0), (40, 7.0))
        )
        check = bar(5, 5, 6.0, "Validation DataLoader 0: ") + bar(
            40, 40, 7.0, f"Epoch {number}: ", "val_loss=5.5, train_"
        )
        return "".join(bars) + check

    found = read(tmp_path, epoch(0) + epoch(1))
    assert [step for step, loss, _ in found if loss is not None] == [0, 20, 40, 60, 80]
    assert [row for row in found if row[1] is None] == [(40, None, 5.5)], (
        "an evaluation once, though each bar repeats it"
    )
    assert [step for step, loss, _ in read(tmp_path, epoch(2)) if loss is not None] == [80, 100, 120]


@pytest.mark.parametrize(
    ("heads", "total"),
    [(("", "", ""), None), (("Epoch 1/3: ", "Epoch 2/3: ", "Epoch 3/3: "), 30), (("Epoch 1:",) * 1, None)],
)
def test_a_bar_for_each_epoch_counts_on(tmp_path: Path, heads: tuple[str, ...], total: int | None) -> None:
    output = "".join(bar(step, 10, 1.0, head) for head in heads for step in (0, 5, 10))
    found = read(tmp_path, output)
    assert [step for step, _, _ in found] == [0, 5, 10, 15, 20, 25, 30][: 1 + 2 * len(heads)]
    if total is not None:
        assert {most for _, _, most in found} == {total}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "iter 0: loss 4.0, time 1.00ms, mfu -100.00%\niter 10: loss 3.5, time 1.00ms, mfu 0%\n",
            [(0, 4.0, None), (10, 3.5, None)],
        ),
        ("step 0: train loss 4.2, val loss 4.3\n", [(0, None, 4.3)]),
        ("\x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[34mmemory:  1GiB(1%)  tps: 1\x1b[39m\n", [(1, 8.1, None)]),
        (
            "[rank0]:step:  1  loss:  8.1  x\n[rank1]:step:  2  loss:  8.1  x\n[default3]:step:  3  loss: 8.1  x\n",
            [(1, 8.1, None)],
        ),
        ("1|20|Loss: 1.25:  10%|#   | 20/200 [00:40<06:00,  2.00s/it]\n", [(20, 1.25, None)]),
        (
            "Train Epoch: 1 [640/1000 (64%)]\tLoss: 2.25\nTrain Epoch: 2 [0/1000 (0%)]\tLoss: 2.0\n",
            [(640, 2.25, None), (1000, 2.0, None)],
        ),
        (
            "Train Epoch: 1 [640/1000 (64%)]\tLoss: 2.25\n\nTest set: Average loss: 0.5, Accuracy: 1/2\n",
            [(640, 2.25, None), (640, None, 0.5)],
        ),
        (
            "[1,  2000] loss: 2.2\n[1,  4000] loss: 2.1\n[2,  2000] loss: 2.0\n",
            [(2000, 2.2, None), (4000, 2.1, None), (6000, 2.0, None)],
        ),
        (
            "Epoch 0: Test accuracy 0.9, Time 1.0 (s)\nEpoch 1: Test accuracy 0.92, Time 1.0 (s)\n",
            [(0, None, None), (1, None, None)],
        ),
        ("Starting training..., iters: 600\nIter 10: Train loss 2.5, It/sec 3.1\n", [(10, 2.5, 600)]),
        ("{'train_loss': 1.25, 'iter': 10, 'iters': 40}\n", [(10, 1.25, 40)]),
        (
            "{'global_step': 20, 'train/loss': 1.25}\nINFO:root:{\"step\": 30, \"loss\": 1}\n",
            [(20, 1.25, None), (30, 1.0, None)],
        ),
        ('{"step": 5, "train": {"loss": 1.5}, "val": {"loss": 1.75}}\n', [(5, 1.5, None), (5, None, 1.75)]),
        ("{'iter': 10, 'loss': tensor(2.5, device='cuda:0')}\n", [(10, 2.5, None)]),
        ("08/01/2026 10:00:00 - INFO - __main__ - step 10: loss 2.5\n", [(10, 2.5, None)]),
        ("08/01/2026 10:00:00 - INFO - __main__ - epoch 0: perplexity: 3.2 eval_loss: 1.25\n", [(0, None, 1.25)]),
        (
            "Step [20/300], Loss: 2.5\nstep 40/300 | train loss 2.25 | val loss 2.5 | lr 1e-4\n",
            [(20, 2.5, 300), (40, 2.25, 300), (40, None, 2.5)],
        ),
        ("Eval step 40 loss 2.5\n", [(40, None, 2.5)]),
        ("Epoch 1/2 Step 1/10 loss 3\nEpoch 2/2 Step 1/10 loss 2\n", [(1, 3.0, 20), (11, 2.0, 20)]),
        ("Epoch 1, step 100, loss 3\nEpoch 2, step 50, loss 2\n", [(100, 3.0, None), (150, 2.0, None)]),
        ("Epoch 1/3, Loss: 2.5\nEpoch 2/3, Loss: 2.0, val_loss: 2.25\n", [(1, 2.5, 3), (2, 2.0, 3), (2, None, 2.25)]),
        ("step 10 loss 2.5\nEpoch 1 mean loss: 3\nEpoch 1 val_loss: 2\n", [(10, 2.5, None), (10, None, 2.0)]),
        ("steps: 10 loss: nan iter time (s): 0.3 samples/sec: 9\n", [(10, None, None)]),
        ('{"step": 10, "loss": NaN}\nstep 20/  40 loss: NaN\n', [(10, None, None), (20, None, 40)]),
        ("step 1e999 loss 2\nstep 3 loss 1e999\n", [(3, None, None)]),
        ("The loss of step 3 was computed, loss function: 1\nmax loss 3 at step 2\n", []),
    ],
)
def test_what_programs_print_is_read_with_their_own_steps(tmp_path: Path, output: str, expected: list[Any]) -> None:
    assert read(tmp_path, output) == expected


@pytest.mark.needs("recordings")
@pytest.mark.parametrize(("version", "total"), [("0.31.3", 20), ("0.32.2", 30)])
def test_mlx_lms_own_output_is_read_with_its_iterations(tmp_path: Path, version: str, total: int) -> None:
    """Also the coloured table of the newer one."""
    output = (RECORDINGS / f"mlx_lm.lora-{version}-2ranks-stdout__own-linux-cpu.txt").read_text()
    assert read(tmp_path, output) == [
        (1, None, 5.969),
        (5, 5.815, total),
        (10, None, 5.473),
        (10, 5.583, total),
        (15, 5.358, total),
        (20, None, 5.089),
        (20, 5.133, total),
    ]


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_the_real_trainers_steps_are_those_of_its_own_state(tmp_path: Path) -> None:
    """transformers in .venv-torch, with messages of log_level="info" on the lines of its bar."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    shown = subprocess.run(
        [TORCH, script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=500
    )
    history = json.loads((tmp_path / "history.json").read_text())
    expected = [(row["step"], row.get("loss", row.get("eval_loss"))) for row in history if "train_runtime" not in row]
    found = [(step, loss if loss is not None else other) for step, loss, other in read(tmp_path, shown.stdout.decode())]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-3)


TRAINER = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, place):
        row = torch.arange(place, place + 8) % 32
        return {"input_ids": row, "labels": row}

shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **shape))
how = {"logging_steps": 3, "eval_steps": 6, "save_steps": 6, "eval_strategy": "steps", "log_level": "info"}
how["use_cpu"] = True
arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, report_to=[], **how)
trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
trainer.train()
json.dump(trainer.state.log_history, open("history.json", "w"))
"""


def test_figures_of_a_step_that_stand_in_two_lines_are_one_report_in_the_end(tmp_path: Path) -> None:
    line = b"[2026-08-01] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[[0.8, 0.999]]\n"
    found = events_of(tmp_path, line, b"steps: 10 loss: 2.3 iter time (s): 0.3 samples/sec: 99.6\n")
    reports = [row for row in found if row["event"] == "report"]
    assert reports[-1] == {"event": "report", "iteration": 10, "train_loss": 2.3, "learning_rate": 0.001}


def test_a_jobs_own_pattern_is_read_and_no_other_line(tmp_path: Path) -> None:
    pattern = r"\[(?P<step>\d+) of (?P<total>\d+)\] L=(?P<loss>[\d.]+)|V@(?P<iter>\d+)=(?P<val_loss>[\d.]+)"
    output = "iter 1: loss 9.0, time\n[20 of 300] L=2.5 step 7 loss 7\nV@40=2.25\n" + "[9 of 9] L=1" + "1" * 1100 + "\n"
    assert read(tmp_path, output, pattern) == [(20, 2.5, 300), (40, None, 2.25)]


@pytest.mark.parametrize("line", ["[20 of 300] L=2.5 " + "x" * 1000, "1" * 26 + " [20 of 300] L=2.5"])
def test_a_line_in_which_a_pattern_could_try_too_much_is_left_out(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line + "\n", r"\[(?P<step>\d+) of 300\] L=(?P<loss>[\d.]+)") == []


@pytest.mark.parametrize("prefix", ["[rank0]:", "[default0]: ", "[rank 0] "])
def test_of_workers_that_torchrun_tells_apart_the_first_one_counts(tmp_path: Path, prefix: str) -> None:
    lines = [
        f"{prefix}Step 20 | loss:1.5 lr:1",
        f"{prefix.replace('0', '1')}Step 30 | loss:2.5 lr:1",
        prefix + bar(35, 50)[1:],
        f"{prefix}{{'loss': '2.5'}}",
    ]
    assert read(tmp_path, "\n".join([*lines, prefix + bar(40, 50)[1:], ""])) == [(20, 1.5, None), (40, 2.5, 50)]


def test_a_bar_of_something_else_gives_no_total(tmp_path: Path) -> None:
    assert read(tmp_path, bar(500, 500) + "\niter 10: loss 2.5, time 1ms\n") == [(10, 2.5, None)]


def test_a_line_between_the_bars_does_not_begin_the_count_anew(tmp_path: Path) -> None:
    lines = [
        bar(10, 10, 1.0),
        "\nstep 10: val loss 2.0\n",
        bar(5, 10, 0.9),
        "\nlogger tests.run: step 15 loss 3\n",
        bar(7, 10, 0.8),
    ]
    assert [step for step, _, _ in read(tmp_path, "".join(lines))] == [10, 10, 15, 15, 17]


def test_a_pattern_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.node.script_metrics._OWN_LIMIT_S", -1.0)
    line = "[20 of 300] L=2.5\n"
    assert read(tmp_path, line + line.replace("20", "30"), r"\[(?P<step>\d+) of 300\] L=(?P<loss>[\d.]+)") == [
        (20, 2.5, None)
    ]
    assert "takes too long" in (tmp_path / "events.jsonl").read_text()


def test_a_pattern_that_would_take_minutes_for_a_line_is_given_up_by_its_beginning(tmp_path: Path) -> None:
    line = ("1" * 25 + " ") * 38
    before = time.thread_time()
    assert read(tmp_path, f"{line}\n", r"(?P<step>\d+).*(?P<loss>\d+).*x") == []
    assert time.thread_time() - before < 20, "it takes more than 90 s for the whole line"
    assert "takes too long" in (tmp_path / "events.jsonl").read_text()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 50)), min_size=1, max_size=8), st.booleans())
def test_steps_over_epochs_only_grow(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[tuple[int, int]], named: bool
) -> None:
    """Whatever is left out of a bar's lines, which tqdm does not print for every step."""
    total = 50
    lines = (
        bar(step, total, 1.0, f"Epoch {number}: " if named else "")
        for number, (_, last) in enumerate(epochs)
        for step in (0, last)
    )
    steps = [step for step, _, _ in read(tmp_path_factory.mktemp("epochs"), "".join(lines))]
    assert steps == sorted(set(steps)) and steps[-1] == (len(epochs) - 1) * total + epochs[-1][1]


@pytest.fixture(autouse=True)
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """New files are found at once."""
    monkeypatch.setattr("engine.node.script_metrics._SEARCH_EVERY_S", 0.0)


class Tracker:
    """A script's TensorBoard, and the keeper's reader of it."""

    def __init__(self, folder: Path) -> None:
        event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
        summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.folder, self.path = folder / "logs" / "run", folder / "events.jsonl"
        self.reader = TensorBoardMetrics(EventWriter(self.path, 0, 1), folder / "logs")
        self.reader.skip()
        self.writer = self.file()

    def file(self) -> Any:
        writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
        return writer.EventFileWriter(str(self.folder))

    def add(self, step: int, *, at: float = 0.0, **values: float) -> None:
        """One event for each value, as SummaryWriter.add_scalar writes them."""
        for name, value in values.items():
            summary = self.summary(value=[self.summary.Value(tag=name.replace("__", "/"), simple_value=value)])
            self.writer.add_event(self.event(wall_time=at, step=step, summary=summary))
        self.writer.flush()

    @property
    def rows(self) -> list[dict[str, Any]]:
        self.reader.poll()
        return rows_of(self.path)


@pytest.mark.needs("trackers")
def test_the_scalars_of_a_step_are_one_report(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(10, at=100.0, train_loss=2.0)
    assert tracker.rows == []
    tracker.add(10, at=100.0, learning_rate=0.125, accuracy=0.5)
    tracker.add(30, at=105.0, Loss__train=1.5, validation__loss=1.75, loss_metrics__global_max_loss=9.0)
    assert tracker.rows == []
    first = [
        {"event": "step", "iteration": 10},
        {"event": "report", "iteration": 10, "train_loss": 2.0, "learning_rate": 0.125},
    ]
    second = [
        {"event": "step", "iteration": 30},
        {"event": "report", "iteration": 30, "train_loss": 1.5, "iterations_per_second": 4.0},
        {"event": "validation", "iteration": 30, "val_loss": 1.75},
    ]
    assert tracker.rows == first + second


@pytest.mark.needs("trackers")
def test_what_was_there_before_is_another_runs(tmp_path: Path) -> None:
    before = Tracker(tmp_path)
    before.add(1, train_loss=9.0)
    tracker = Tracker(tmp_path)
    tracker.add(2, train_loss=1.0)
    assert tracker.rows == []
    assert {row["iteration"] for row in tracker.rows} == {2}


@pytest.mark.needs("trackers")
def test_what_a_script_writes_last_is_reported_when_it_has_ended(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(1, train_loss=9.0)
    reader = TensorBoardMetrics(EventWriter(tracker.path, 0, 1), tmp_path)
    reader.start()
    wait_until(lambda: reader.follows)
    tracker.add(2, train_loss=1.0)
    reader.finish(within_s=30.0)
    assert [(row["event"], row["iteration"]) for row in rows_of(tracker.path)] == [("step", 2), ("report", 2)]


@pytest.mark.needs("trackers")
def test_the_trainers_mean_loss_is_not_the_last_one(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(30, train__loss=1.5, train__train_loss=2.25, train__train_runtime=9.0)
    assert tracker.rows == []
    assert [row["train_loss"] for row in tracker.rows if row["event"] == "report"] == [1.5]


@pytest.mark.needs("trackers")
def test_a_record_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(5, train_loss=3.0)
    (file,) = tracker.folder.iterdir()
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert tracker.rows == []
    file.write_bytes(whole)
    assert tracker.rows == []
    assert [row["train_loss"] for row in tracker.rows if row["event"] == "report"] == [3.0]


@given(st.binary(max_size=300), st.booleans())
def test_no_file_harms(tmp_path_factory: pytest.TempPathFactory, content: bytes, framed: bool) -> None:
    folder = tmp_path_factory.mktemp("logs")
    reader = TensorBoardMetrics(EventWriter(None, 0, 1), folder)
    if framed:
        content = len(content).to_bytes(8, "little") + bytes(4) + content + bytes(4)
    (folder / f"events.out.tfevents.1.{socket.gethostname()}.1.0").write_bytes(content)
    reader.poll()
    reader.poll()


def test_what_every_rank_below_a_launcher_inside_the_command_prints_is_reported_once(tmp_path: Path) -> None:
    """nanoGPT's lines by each of two ranks of `mlx.launch -n 2 -- python train.py`: line by line, or as one's pipe and
    then the other's is emptied."""
    lines = "step {0}: train loss 2.4000, val loss 2.6000\niter {0}: loss 2.5000, time 15.00ms, mfu 3.10%\n"
    printed = "".join(lines.format(step) for step in (0, 10)).splitlines(keepends=True)
    reports = [(0, None, 2.6), (0, 2.5, None), (10, None, 2.6), (10, 2.5, None)]
    assert read(tmp_path, "".join(2 * line for line in printed)) == reports
    assert read(tmp_path, "".join(2 * printed)) == reports


def test_repeated_values_of_a_step_show_that_the_program_goes_on(tmp_path: Path) -> None:
    """Its step is the epoch, and its losses are rounded."""
    rows = events_of(tmp_path, *(b"epoch 1, step 1, loss 0.%d\n" % (number % 3) for number in range(50)))
    assert [row["event"] for row in rows].count("step") == 50
    assert [row["train_loss"] for row in rows if row["event"] == "report"] == [0.0, 0.1, 0.2]


def test_a_repeat_is_looked_for_among_the_newest_reports_alone(tmp_path: Path) -> None:
    lines = "".join(f"step 1, loss 0.{number}\n" for number in range(100, 400))
    assert len(read(tmp_path, 2 * lines)) == 600
