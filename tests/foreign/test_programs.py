"""Programs that nobody here wrote, on two nodes: their verdict and metrics, hangs, killed ranks, and aborts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import Reason, RunState
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, start_on
from tests.faults.local_runs import SHORT_GRACES, aborted
from tests.foreign.foreign_runs import ENDLESS, foreign_config, start_program
from tests.foreign.table import BY_NAME, PROGRAMS, Program
from tests.needs import TORCH, require

pytestmark = [pytest.mark.busy, pytest.mark.slow, pytest.mark.needs("namespaces")]


PRINT_PLACES_IN_EPOCHS = ("ImageNet", "DeepSpeed's cifar")
"""What they print after a resume in the middle of an epoch is the place in what is left of it, and no step."""
SAVED_LATE = ("accelerate's checkpointing", "Lightning")
"""Here they have done all steps when their checkpoint is seen: a rank that is killed then loses none."""
STAYS = SHORT_GRACES.model_copy(update={"stall_s": 20.0})


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = BY_NAME[request.param]
    require(found.needs)
    return found


def programs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", names, indirect=True)


@programs(*BY_NAME)
def test_its_verdict_steps_losses_and_total_are_its_own(pair: Cluster, home: Path, program: Program) -> None:
    recovery = SHORT_GRACES if program.stays is None else STAYS
    foreign = start_program(pair, home, program, steps=program.steps, recovery=recovery)
    run = foreign.run
    record = run.ended()
    codes = {rank: event.code for rank, event in run.history.attempts[0].ended.items()}
    assert record.attempts == 1
    if program.stays is not None and record.reason is Reason.HUNG:
        assert (record.rank, codes[0]) == (1, 0), run.troubles()
        assert program.stays in run.dir.log(1).read_text().splitlines()[-1]
    else:
        assert (record.state, record.reason) == (RunState.SUCCEEDED, Reason.COMPLETED), run.troubles()
        assert codes == {0: 0, 1: 0}
    if program.read_as is None:
        assert foreign.losses() == {} and record.iteration is None
        return
    own = foreign.own()
    assert foreign.losses() == pytest.approx(own, rel=program.precision, abs=program.precision), run.troubles()
    assert record.iteration == max(own)
    assert record.iterations == program.total
    tried = [] if "metrics" in program.job else foreign.command("metrics", "--try", str(run.dir.log(0)))["reports"]
    assert program.read_as in {"[job] metrics", *(report["read_as"] for report in tried)}, tried


def await_training(run: ClusterRun, program: Program) -> None:
    """Until it makes steps, as its metrics say or its output."""
    if program.read_as is None:
        run.await_output("Epoch 1", 1)
    else:
        run.wait(lambda: run.dir.metrics.exists() and run.dir.metrics.read_bytes().count(b"\n") >= 2)


@programs("nanoGPT", "DDP tutorial", "transformers' Trainer", "Lightning", "mlx_lm.lora", "MLX's transformer_lm")
def test_a_stopped_rank_is_found_and_named(pair: Cluster, home: Path, program: Program) -> None:
    limits = SHORT_GRACES.model_copy(update={"hang_s": 6.0, "stall_s": 60.0})
    run = start_program(pair, home, program, steps=ENDLESS, recovery=limits).run
    await_training(run, program)
    pair["bea"].run(["kill", "-STOP", str(run.identity(1).trainer_pid)])
    record = run.ended()
    assert (record.state, record.reason, record.rank) == (RunState.FAILED, Reason.HUNG, 1), run.troubles()


@programs(*(program.name for program in PROGRAMS if program.saved and program.name not in SAVED_LATE))
def test_after_a_killed_rank_it_goes_on_from_its_own_checkpoint(pair: Cluster, home: Path, program: Program) -> None:
    recovery = SHORT_GRACES.model_copy(update={"restart_commands": True, "max_restarts": 1})
    foreign = start_program(pair, home, program, steps=10 * program.steps, recovery=recovery)
    run = foreign.run
    run.wait(foreign.has_saved)
    run.await_more_output(0)
    run.kill(1, run.identity(1).trainer_pid)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    first = run.history.attempts[0].status
    assert (first.reason, first.rank, first.host) == (Reason.RANK_KILLED, 1, "bea"), run.troubles()
    if program.read_as is not None and program.name not in PRINT_PLACES_IN_EPOCHS:
        again = foreign.losses_of(attempt=2)
        assert min(again) > program.steps / 4, "it began anew"
        own = foreign.own()
        assert again == pytest.approx({step: own[step] for step in again}, rel=program.precision, abs=program.precision)
        assert record.iteration == max(own)


@programs("ImageNet", "trl's sft", "Lightning", "python -m mlx_lm lora", "DeepSpeed's cifar")
def test_an_abort_leaves_nothing(pair: Cluster, home: Path, program: Program) -> None:
    run = start_program(pair, home, program, steps=ENDLESS).run
    await_training(run, program)
    aborted(run)


def test_a_launcher_inside_a_script_is_refused_before_the_launch_and_never_a_success(pair: Cluster, home: Path) -> None:
    """After the tutorials' `bash run.sh` with `torchrun --standalone` inside."""
    require("torch")
    nested = Program("nested", "script", ("bash", "run.sh"), None)
    config, folder = foreign_config(pair, nested, 60, SHORT_GRACES)
    (folder / "run.sh").write_text("#!/bin/bash\ntorchrun --standalone --nproc_per_node=1 nanogpt.py\n")
    checked = start_on(pair, home, config, skip=()).ended()
    assert checked.state is RunState.FAILED and checked.attempts == 0, checked
    torchrun = f"{TORCH} -m torch.distributed.run --standalone --nproc_per_node=1"
    (folder / "run.sh").write_text(f"#!/bin/bash\n{torchrun} nanogpt.py --max_iters=800\n")
    run = start_on(pair, home, config)
    run.wait(lambda: run.record.state.ended, after_end=True)
    assert (run.record.state, run.record.reason) == (RunState.FAILED, Reason.SEPARATE_GROUPS), run.troubles()
    assert run.record.fix is not None and "remove the launcher" in run.record.fix
