"""A node with a Mac's personality answers as a Mac: commands, python, shell, limits, cables, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.command import command
from tests.cluster.mac.cluster import MacCluster, MacNode
from tests.cluster.mac.commands import EX_USAGE, Mac, answer, vis
from tests.cluster.mac.personality import documents
from tests.cluster.machine import until
from tests.cluster.test_nodes import ssh

PYTHON = """
import ctypes, errno, fcntl, json, os, platform, socket, sys, tempfile
with tempfile.TemporaryFile() as file:
    synced = fcntl.fcntl(file, fcntl.F_FULLFSYNC)
with open("/Volumes/smb/file", "w") as file:
    try:
        refused = fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
    except OSError as error:
        refused = errno.errorcode[error.errno]
    os.fsync(file.fileno())
open(os.path.expanduser("~/Adapters"), "w").close()
import mlx.core as mx
import mlx_lm
print(json.dumps([
    sys.platform, os.uname().sysname, platform.machine(), platform.mac_ver()[0], synced, refused,
    os.path.exists(os.path.expanduser("~/adapters")), hasattr(os, "pidfd_open"), hasattr(socket, "TCP_KEEPALIVE"),
    ctypes.CDLL(None).pthread_set_qos_class_self_np(0x21, 0), (mx.array(1) + 1).item(),
]))
"""


def test_one_that_has_too_few_ports_and_names_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="too few Thunderbolt ports for 'mesh'"):
        documents(["a", "b", "c", "d"], ["m1-air-8"], "mesh")
    with pytest.raises(LookupError, match="'m9' is none of the personalities: m1-air-8"):
        documents(["a"], ["m9"], "mesh")


def test_what_is_not_known_of_a_command_is_not_answered() -> None:
    (document,) = documents(["ana"], ["m4-max-128"], "mesh")
    mac = Mac(document)
    assert answer(mac, "rdma_ctl", ["enable"])[2] == EX_USAGE
    assert answer(mac, "stat", ["-c", "%s", "/"]) == ("", "stat: illegal option -- c\nusage: stat\n", 1)
    assert answer(mac, "sysctl", ["-n", "hw.nope", "hw.memsize"]) == (
        "137438953472\n",
        "sysctl: unknown oid 'hw.nope'\n",
        1,
    )


def test_ps_shows_bytes_as_strvis_does() -> None:
    """A table that was measured on macOS 26.6.2, for /bin/ps of adv_cmds-237 in the C locale."""
    text = "a b\\\t\né\xa0".encode()
    assert vis(text + b"\x01\x7f\x80\xff") == r"a b\\011\012M-CM-)M-B\240^A^?M^@M^?"


pytestmark = pytest.mark.needs("namespaces")


@pytest.fixture(scope="module")
def macs() -> Iterator[MacCluster]:
    with MacCluster(2, ["m4-max-128", "m1-air-8"], "bridge") as cluster:
        yield cluster


@pytest.fixture
def ana(macs: MacCluster) -> Iterator[MacNode]:
    node = macs.nodes[0]
    assert isinstance(node, MacNode)
    yield node
    macs.heal()


def test_commands_answer_over_ssh(macs: MacCluster, ana: MacNode) -> None:
    output = ssh(macs, ana, "echo $HOME; uname -sm; sysctl -n hw.memsize hw.model; ulimit -n; ls /proc; hostname")
    assert output.split() == ["/Users/ana", "Darwin", "arm64", "137438953472", "Mac16,9", "256", "ana"]
    air = ssh(macs, macs.nodes[1], "sw_vers -productVersion; sysctl -n machdep.cpu.brand_string; pmset -g batt")
    assert air.splitlines()[:2] == ["15.7.2", "Apple M1"] and "63%; discharging" in air
    assert ssh(macs, macs.nodes[1], "command -v ibv_devices rdma_ctl macmon setsid; echo none") == "none"
    assert "a terminal is required" in ssh(macs, ana, "sudo -k id -u 2>&1 || true")
    path = ssh(macs, ana, "TMPDIR=/tmp mktemp")
    assert path.startswith("/var/folders/")
    assert ssh(macs, ana, "echo $TMPDIR").startswith("/var/folders/")


def test_its_python_is_a_macs(macs: MacCluster, ana: MacNode) -> None:
    ana.write("~/about.py", PYTHON)
    expected = ["darwin", "Darwin", "arm64", "26.4.1", 0, "ENOTSUP", True, False, True, 0, 2]
    assert json.loads(ssh(macs, ana, f"{ana.python} about.py")) == expected


def test_ps_hides_the_environment_of_apples_programs_and_shows_that_of_others(macs: MacCluster, ana: MacNode) -> None:
    nonce = "export FLIGHTDECK_NONCE=4711"
    ssh(macs, ana, f"({nonce}; {ana.python} -c 'import time; time.sleep(60)' & /bin/sleep 60 &) >/dev/null 2>&1")
    programs = {ana.python.replace("~", ana.home), "/bin/sleep"}
    until(lambda: {each.command.split()[0] for each in ana.processes("4711")} == programs, "both", str)
    seen = ssh(macs, ana, "/bin/ps -axEww -o pid=,stat=,command=")
    marked = {line.split()[2]: "FLIGHTDECK_NONCE=4711" in line for line in seen.splitlines()}
    assert (marked[ana.python.replace("~", ana.home)], marked["/bin/sleep"]) == (True, False), seen


def test_caffeinate_holds_an_assertion_while_its_process_lives(macs: MacCluster, ana: MacNode) -> None:
    script = "/bin/sleep 60 >/dev/null & caffeinate -i -w $! >/dev/null 2>&1 & "
    script += "until pmset -g assertions | grep -q 'SystemSleep *1'; do :; done; kill %1; wait; pmset -g assertions"
    assert "PreventUserIdleSystemSleep     0" in ssh(macs, ana, script)


def test_the_cables_are_real_and_the_set_up_commands_give_them_addresses(macs: MacCluster, ana: MacNode) -> None:
    bea = macs.nodes[1]
    assert "inet 169.254.40.7 netmask 0xffff0000" in ssh(macs, ana, "ifconfig bridge0")
    for node, device, own, peer in (
        (ana, "en5", "192.168.0.1", "192.168.0.2"),
        (bea, "en2", "192.168.0.2", "192.168.0.1"),
    ):
        lines = f"ifconfig bridge0 down && ifconfig {device} inet {own} netmask 255.255.255.252 && "
        command(*node.inside(), "/bin/sh", "-c", f"{lines} route change {peer} -interface {device}")
    try:
        assert "\tmember: en5 " in ssh(macs, ana, "ifconfig bridge0")
        knock = "import socket; print(socket.create_connection(('192.168.0.2', 22), 5).getsockname()[0])"
        assert ssh(macs, ana, f'{ana.python} -c "{knock}"') == "192.168.0.1"
    finally:
        for node in macs.nodes:
            node.power_off()
            node.power_on()
    assert "inet " not in ssh(macs, ana, "ifconfig en5"), "they last until the Mac restarts"


def test_commands_are_late_cut_and_failing_until_they_are_healed(macs: MacCluster, ana: MacNode) -> None:
    ana.set_fault("sw_vers", cut=12, exit_code=3, errors="Killed: 9\n")
    ana.set_fault("uname", output="")
    argv = ["ssh", "-F", str(macs.ssh_config), ana.ssh, "uname; sw_vers"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ProductName:", "Killed: 9\n")
    ana.heal()
    assert ssh(macs, ana, "uname") == "Darwin"
