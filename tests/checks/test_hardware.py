"""hardware_layer, on recorded facts of Macs and on the nodes of this machine."""

from __future__ import annotations

from pathlib import Path

from engine.checks import hardware as check
from engine.checks import performance, sync
from engine.checks.plan_inputs import MemoryNeed
from engine.cluster.probe_results import PortHolder
from engine.config.models import Config, JobConfig
from engine.errors import ENABLE_RDMA, LaunchError
from engine.models import CheckResult, CheckStatus, NodeFacts
from engine.plan.document import PlanIssue, RankMemory
from tests.checks.conftest import run_check
from tests.checks.recorded import GB, RANK, STUDIO, mac, studio
from tests.unit.cluster.cuda_nodes import cpu_node, cuda_node


def memory(needed_gb: int) -> RankMemory:
    sizes = {"peak_bytes": needed_gb * GB, "reserve_bytes": 0, "limit_bytes": 412 * GB}
    return RankMemory(**{**RANK, **sizes, "fits": needed_gb <= 412})


FITS = memory(300)


def evaluated(
    config: Config, *facts: NodeFacts, need: MemoryNeed = FITS, refusals: tuple[PlanIssue, ...] = ()
) -> CheckResult:
    names = [node.name for node in config.nodes]
    seen = dict(zip(names, facts, strict=True))
    return check.evaluate(config, seen, dict.fromkeys(names, need), {}, refusals)


def test_two_studios_at_rest_pass_and_say_what_they_have() -> None:
    result = evaluated(studio(), mac("ultra"), mac("max"))
    assert result.status is CheckStatus.PASS, result
    evidence = result.evidence["ultra"]
    for text in ("Apple M3 Ultra: MLX uses its gpu", "macOS 26.4.1", "RDMA rdma_en3", "power AC", "heat nominal"):
        assert text in evidence
    assert "needs 300 GB of 412 GB (by estimate, limit by Metal)" in evidence


def test_mlx_on_the_cpu_of_a_mac_is_a_failure_with_what_installs_metal() -> None:
    on_cpu = '{"gpu": "cpu", "backends": ["ring", "jaccl"], "working_set": null}'
    result = evaluated(studio(), mac("ultra"), mac("max", mlx_import=on_cpu))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "max"))
    assert "MLX there uses the cpu and not the GPU (Metal)" in result.summary
    assert result.fixes["max"] == 'uv pip install --python "$HOME"/venv/bin/python --reinstall mlx==0.32.4'


def test_a_cpu_build_beside_nvidia_gpus_is_a_warning_with_what_installs_the_cuda_build() -> None:
    result = evaluated(studio(), cuda_node("ultra"), cpu_node("max"))
    assert (result.status, "MLX computes on its CPU, and nvidia-smi lists 3 GPUs" in result.summary) == (
        CheckStatus.WARN,
        True,
    )
    at = '--python "$HOME"/venv/bin/python'
    install = f"uv pip install --reinstall-package mlx-cuda-13 {at} 'mlx[cuda13]==0.32.4'"
    assert result.fixes["max"] == f"uv pip uninstall {at} mlx-cpu && {install}"
    assert "NVIDIA H100 80GB HBM3: MLX uses its gpu" in result.evidence["ultra"]


def test_memory_beyond_the_limit_fails_and_an_unknown_one_warns() -> None:
    result = evaluated(studio(), mac("ultra"), mac("max"), need=memory(500))
    assert (result.status, "needs 500 GB of 412 GB" in result.summary) == (CheckStatus.FAIL, True)
    unknown = "model_type = 'x' is not one whose memory can be estimated"
    training = studio().model_copy(update={"job": JobConfig(name="job")})
    result = evaluated(training, mac("ultra"), mac("max"), need=unknown)
    assert (result.status, "memory not compared: model_type" in result.summary) == (CheckStatus.WARN, True)
    own = "the job runs a command of its own"
    assert evaluated(studio(), mac("ultra"), mac("max"), need=own).status is CheckStatus.PASS


def test_what_the_plan_refuses_is_refused_here() -> None:
    refusals = (PlanIssue(name="too_large", text="70B fits no single Mac: use sharded or pipeline"),)
    result = evaluated(studio(), mac("ultra"), mac("max"), refusals=refusals)
    assert (result.status, result.summary) == (CheckStatus.FAIL, refusals[0].text)


def test_memory_hides_no_other_refusal_and_is_reported_once() -> None:
    refusals = (
        PlanIssue(name="memory", text="it fits on no node; it fits with less", todo="it fits with less"),
        PlanIssue(name="data_quality", text="the data report says poisoning_detected: true"),
    )
    result = evaluated(studio(), mac("ultra"), mac("max"), need=memory(500), refusals=refusals)
    assert result.status is CheckStatus.FAIL
    assert result.summary.startswith(
        "it fits with less; the data report says poisoning_detected: true; needs 500 GB of 412 GB"
    )
    assert "it fits on no node" not in result.summary


def test_a_shortage_of_the_machines_own_memory_is_told_beside_that_of_its_gpu() -> None:
    texts = ("ultra needs 500 GB of 412 GB", "ultra needs 90 GB of 64 GB of its machine's memory for the moments")
    refusals = tuple(PlanIssue(name="memory", text=text, todo="it fits with less") for text in texts)
    result = evaluated(studio(), mac("ultra"), mac("max"), need=memory(500), refusals=refusals)
    assert texts[1] in result.summary and result.summary.startswith("it fits with less; ")


def test_it_runs_after_the_sync_that_may_bring_the_model() -> None:
    assert sync.NAME in check.CHECK.after
    assert sync.NAME in performance.CHECK.after


def test_rdma_that_is_off_fails_only_where_jaccl_is_demanded_and_says_that_a_person_must_act() -> None:
    off = mac("max", rdma_ctl="disabled\n", ibv_devices=None)
    demanded = evaluated(studio(backend="jaccl"), mac("ultra"), off)
    assert (demanded.status, demanded.blames) == (CheckStatus.FAIL, (1, "max"))
    assert f"no RDMA, which jaccl needs: RDMA is disabled: {ENABLE_RDMA}" in demanded.summary
    assert demanded.fix_command is None
    tried = evaluated(studio(), mac("ultra"), off)
    assert (tried.status, "max: no RDMA: RDMA is disabled" in tried.summary) == (CheckStatus.WARN, True)
    assert evaluated(studio(backend="ring"), mac("ultra"), off).status is CheckStatus.PASS
    for unable in ({"strategy": "local"}, {"framework": "torch"}):
        job = studio().job.model_copy(update=unable)
        tried = evaluated(studio().model_copy(update={"job": job}), mac("ultra"), off)
        assert "RDMA" not in tried.summary, unable


def test_an_older_macos_is_named_where_jaccl_is_demanded() -> None:
    older = str(STUDIO["sw_vers"]).replace("26.4.1", "26.1")
    result = evaluated(studio(backend="jaccl-ring"), mac("ultra", sw_vers=older), mac("max"))
    assert "macOS 26.1 is too old for RDMA: update to 26.2" in result.summary
    assert result.status is CheckStatus.FAIL


def test_battery_and_heat_warn() -> None:
    battery = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t63%; discharging; 4:10 remaining\n"
    hot = "CPU_Scheduler_Limit \t= 100\nCPU_Available_CPUs \t= 12\nCPU_Speed_Limit \t= 62\n"
    result = evaluated(studio(), mac("ultra"), mac("max", pmset_batt=battery, pmset_therm=hot))
    assert (result.status, result.fix_command) == (CheckStatus.WARN, None)
    assert "runs on battery 63 %: plug it in" in result.summary
    assert "is throttled by heat: CPU limited to 62 %" in result.summary


def test_a_held_port_is_reported_with_its_pid_and_ports_that_are_not_known_warn() -> None:
    config, facts = studio(), {"ultra": mac("ultra"), "max": mac("max")}
    held = {"max": {"10.0.0.2:30001": PortHolder(holder="pid 77 (python)", pid=77, orphan=True)}}
    result = check.evaluate(config, facts, dict.fromkeys(facts, FITS), held)
    assert (result.status, result.fixes) == (CheckStatus.FAIL, {"max": "kill 77"})
    assert "10.0.0.2:30001 on max is held by pid 77 (python), a rank of a Flight Deck run" in result.summary
    result = check.evaluate(config, facts, dict.fromkeys(facts, FITS), {"max": LaunchError("no answer")})
    assert (result.status, "its ports are not known: no answer" in result.summary) == (CheckStatus.WARN, True)


def test_a_node_that_tells_nothing_is_a_warning_and_no_silent_pass() -> None:
    silent = NodeFacts(node="max", host="max.local", probed_at=mac().probed_at, problem="no answer within 12 s")
    result = evaluated(studio(), mac("ultra"), silent)
    assert (result.status, result.summary) == (
        CheckStatus.WARN,
        "max: its hardware is not known: no answer within 12 s",
    )


async def test_the_nodes_of_this_machine_are_fit_for_a_small_model(config: Config) -> None:
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.PASS, result
    assert "MLX uses its " in result.evidence["node0"]


async def test_a_model_without_sizes_leaves_the_memory_uncompared(config: Config, model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama"}')
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.WARN, result
    assert "memory not compared" in result.summary
