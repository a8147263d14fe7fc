"""health_check on recorded output of Macs, on this machine's real load, and on nodes that have gone away."""

from __future__ import annotations

import re
import time

import pytest

from engine.checks import health as check
from engine.checks.health import HeartbeatResult, LoadResult, sleep_prevented
from engine.cluster.probe_results import BusyProcess, SystemLoad
from engine.config.models import Config
from engine.errors import LaunchError, NodeUnreachable
from engine.models import CheckResult, CheckStatus, NodeFacts
from tests.checks.conftest import run_check
from tests.checks.recorded import STUDIO, mac, studio
from tests.cluster.mac.commands import SETTINGS
from tests.unit.cluster.cuda_nodes import cuda_node

PREVENTED = """2026-11-21 12:00:00 +0100
Assertion status system-wide:
   BackgroundTask                 0
   PreventSystemSleep             0
   PreventUserIdleSystemSleep     1
Listed by owning process:
   pid 411(caffeinate): [0x0000] 00:01:02 PreventUserIdleSystemSleep named: "caffeinate command-line tool"
"""
QUIET = SystemLoad(processes=[], memory_bytes=128 * 2**30, assertions=PREVENTED, caffeinate=True)


def evaluated(
    *facts: NodeFacts, loads: dict[str, LoadResult] | None = None, heartbeats: dict[str, HeartbeatResult] | None = None
) -> CheckResult:
    config = studio()
    names = [node.name for node in config.nodes]
    now = time.monotonic()
    return check.evaluate(
        config,
        dict(zip(names, facts or (mac("ultra"), mac("max")), strict=True)),
        dict.fromkeys(names, (0.004, now)) | (heartbeats or {}),
        dict.fromkeys(names, QUIET) | (loads or {}),
    )


def test_macs_at_rest_pass_with_their_heartbeat_and_its_age() -> None:
    result = evaluated()
    assert result.status is CheckStatus.PASS, result
    evidence = result.evidence["ultra"]
    heartbeat, _, rest = evidence.partition(" s ago, ")
    assert re.fullmatch(r"heartbeat in 4\.0 ms, \d+\.\d", heartbeat)
    assert rest.startswith("900 GB free on the disk of ~/run, swap 512 MB")
    assert "Low Power Mode off" in evidence
    assert "sleep is prevented now, a run holds caffeinate" in evidence


def test_a_node_without_a_heartbeat_fails_by_name() -> None:
    result = evaluated(heartbeats={"max": NodeUnreachable("does not answer", where="ana@max.local")})
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "max"))
    assert "no heartbeat" in result.summary


def test_low_power_mode_warns_with_what_ends_it() -> None:
    saving = str(STUDIO["pmset"]).replace("lowpowermode         0", "lowpowermode         1")
    result = evaluated(mac("ultra"), mac("max", pmset=saving))
    assert (result.status, result.fixes) == (CheckStatus.WARN, {"max": "sudo pmset -a lowpowermode 0"})


def test_memory_in_swap_warns() -> None:
    full = str(STUDIO["sysctl"]).replace("used = 512.25M", "used = 60.00G")
    result = evaluated(mac("ultra"), mac("max", sysctl=full))
    assert (result.status, "60 GB of its memory are in swap" in result.summary) == (CheckStatus.WARN, True)


def test_a_disk_that_is_nearly_full_warns_a_full_one_fails_and_both_show_the_largest_folders() -> None:
    for free, status in ((800_000_000, CheckStatus.WARN), (1_000, CheckStatus.FAIL)):
        result = evaluated(mac("ultra"), mac("max", disk=[free, 10**12]))
        assert (result.status, "make room, the command lists the largest folders" in result.summary) == (status, True)
        assert result.fixes == {"max": 'du -xak "$HOME"/run 2>/dev/null | sort -rn | head -n 20'}


def test_who_works_the_node_hard_is_named_with_pid_and_only_the_own_users_can_be_ended() -> None:
    mine = BusyProcess(pid=501, command="ollama serve", cores=3.2, rss_bytes=90 * 2**30)
    system = BusyProcess(pid=88, command="WindowServer", cores=1.1, rss_bytes=10**9)
    long = BusyProcess(pid=99, command="x" * 81, cores=1.0, rss_bytes=10**9)
    result = evaluated(
        loads={"max": QUIET.model_copy(update={"processes": [mine, system, long], "memory_bytes": 128 * 2**30})}
    )
    assert (result.status, result.fixes) == (CheckStatus.WARN, {})
    assert "pid 501 (ollama serve) keeps 3.2 cores busy, 90 GB of 128 GB" in result.summary
    assert "pid 88 (WindowServer) keeps 1.1 cores busy" in result.summary
    assert f"pid 99 ({'x' * 79}…) keeps" in result.summary


def test_a_busy_gpu_warns_by_share_on_a_mac_and_by_process_with_nvidia() -> None:
    ioreg = '    "PerformanceStatistics" = {"Device Utilization %"=93,"Renderer Utilization %"=90}'
    result = evaluated(loads={"max": QUIET.model_copy(update={"ioreg": ioreg})})
    assert (result.status, "its GPU is 93% busy already" in result.summary) == (CheckStatus.WARN, True)
    smi = "4242, 40960, /usr/bin/python3\n"
    result = evaluated(loads={"max": QUIET.model_copy(update={"nvidia": smi})})
    assert "pid 4242 (/usr/bin/python3) holds 40 GB of the GPU's memory" in result.summary


def test_gpu_memory_that_is_taken_warns_and_the_contexts_of_probes_do_not() -> None:
    gpu = cuda_node("max")
    own = QUIET.model_copy(update={"nvidia": "77, 540, /opt/venv/bin/python\n", "shm_bytes": 64 << 20})
    result = evaluated(mac("ultra"), gpu, loads={"max": own})
    assert "holds" not in result.summary
    assert "its /dev/shm has 64 MB, less than NCCL" in result.summary
    full = gpu.gpus[0].model_copy(update={"free_bytes": 10 << 30})
    result = evaluated(mac("ultra"), gpu.model_copy(update={"gpus": (full,)}))
    assert "69.6 GB of a GPU's memory are in use, and nvidia-smi lists no process" in result.summary
    late: dict[str, LoadResult] = {"max": QUIET.model_copy(update={"nvidia": None})}
    result = evaluated(mac("ultra"), gpu.model_copy(update={"gpus": (full,)}), loads=late)
    assert "nvidia-smi gave no list" in result.summary and "lists no process" not in result.summary


def test_unknown_load_is_reported() -> None:
    result = evaluated(loads={"max": LaunchError("no answer within 20 s")})
    assert (result.status, "its load is not known" in result.summary) == (CheckStatus.WARN, True)
    result = evaluated(loads={"max": QUIET.model_copy(update={"caffeinate": False})})
    assert "it has no caffeinate" in result.summary


CUSTOM = """Battery Power:
 displaysleep         2
 sleep                1
AC Power:
 Sleep On Power Button 1
 displaysleep         10
 sleep                0
 autorestart          1
 hibernatefile        /var/vm/sleepimage
"""
SCHEDULE = """Repeating power events:
  wakepoweron at 8:00AM every day
  shutdown at 11:00PM every day
Scheduled power events:
 [0]  wake at 12/02/2026 06:55:00 by 'com.apple.alarm.user-visible-Weekly Usage Report'
 [1]  restart at 12/02/2026 03:00:00 by 'admin'
"""


def energy(custom: str = CUSTOM, *, schedule: str = "", updates: int = 0) -> CheckResult:
    text = f"{{\n    AutomaticallyInstallMacOSUpdates = {updates};\n}}\n{custom}{schedule}"
    return evaluated(loads={"max": QUIET.model_copy(update={"energy": text})})


def test_settings_that_let_a_mac_work_all_night_pass() -> None:
    wakes = "Scheduled power events:\n [0]  wake at 12/02/2026 06:55:00 by 'x'\n"
    assert energy(schedule=wakes).status is CheckStatus.PASS
    assert energy(SETTINGS["custom"]).status is CheckStatus.PASS, "as on a Mac of the test cluster"


def test_a_scheduled_shutdown_or_restart_warns_with_what_cancels_it() -> None:
    result = energy(schedule=SCHEDULE)
    assert "macOS is to shutdown at 11:00PM every day; macOS is to restart at 12/02/2026 03:00:00 by 'admin' UTC" in (
        result.summary
    )
    assert result.fixes == {"max": "sudo pmset repeat cancel && sudo pmset schedule cancelall"}


def test_updates_that_restart_a_mac_by_themselves_warn() -> None:
    result = energy(updates=1)
    assert (result.status, result.fixes) == (
        CheckStatus.WARN,
        {
            "max": "sudo defaults write /Library/Preferences/com.apple.SoftwareUpdate AutomaticallyInstallMacOSUpdates "
            "-bool false"
        },
    )


@pytest.mark.parametrize(("name", "is_set", "fixed"), [("sleep", 1, 0), ("displaysleep", 0, 10), ("autorestart", 0, 1)])
def test_an_energy_setting_that_ends_a_night_warns_with_its_fix(name: str, is_set: int, fixed: int) -> None:
    head, ac = CUSTOM.split("AC Power:")
    changed = re.sub(rf"^ {name} +\d+$", f" {name}    {is_set}", ac, flags=re.MULTILINE)
    result = energy(f"{head}AC Power:{changed}")
    assert (result.status, result.fixes) == (CheckStatus.WARN, {"max": f"sudo pmset -c {name} {fixed}"})
    assert result.effects == {"max": f"`sudo pmset -c {name} {is_set}` takes that back"}


def test_sleep_is_prevented_by_an_assertion_that_is_held() -> None:
    assert sleep_prevented(PREVENTED)
    assert not sleep_prevented(PREVENTED.replace("SystemSleep     1", "SystemSleep     0"))


async def test_this_machine_has_a_heartbeat_and_tells_its_load(config: Config) -> None:
    result = await run_check(check.run, config)
    assert result.status is not CheckStatus.FAIL, result
    assert result.evidence["node0"].find("this machine, ") >= 0
