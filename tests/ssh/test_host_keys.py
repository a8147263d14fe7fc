"""A host key is checked always, accepted only by a person, and refused when it is another one."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path

import asyncssh
import pytest

from engine.api import Engine
from engine.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable
from engine.models import HostKeyOffer
from tests.machine import LOOPBACK
from tests.ssh.bench import SshBench, Sshd, public


def offer(error: HostKeyUnknown) -> HostKeyOffer:
    return HostKeyOffer(target=error.target, key=error.key, fingerprint=error.fingerprint)


async def refused(bench: SshBench, sshd: Sshd) -> NodeUnreachable:
    with pytest.raises(NodeUnreachable) as raised:
        await bench.to(sshd).run(["true"], timeout_s=5)
    return raised.value


async def test_an_unknown_key_is_shown_and_after_it_was_accepted_the_node_is_reached(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    unknown = await refused(bench, sshd)
    assert isinstance(unknown, HostKeyUnknown)
    assert (unknown.key, unknown.fingerprint) == (public(sshd.host_key), sshd.fingerprint)
    assert sshd.fingerprint in str(unknown)
    assert not (bench.home / "known_hosts").exists()

    await Engine(bench.home).nodes.accept_host_key(offer(unknown))
    assert (bench.home / "known_hosts").read_text() == sshd.known
    assert (bench.home / "known_hosts").stat().st_mode & 0o777 == 0o600
    audited = json.loads((bench.home / "audit.jsonl").read_text())
    assert (audited["event_type"], audited["status"]) == ("host_key", "accepted")
    assert audited["context"] == {"host": unknown.target, "fingerprint": sshd.fingerprint}
    assert (await bench.to(sshd).run(["true"], timeout_s=5)).code == 0


async def test_accepting_twice_adds_one_line(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    unknown = await refused(bench, sshd)
    assert isinstance(unknown, HostKeyUnknown)
    for _ in range(2):
        await Engine(bench.home).nodes.accept_host_key(offer(unknown))
    assert (bench.home / "known_hosts").read_text() == sshd.known


async def test_a_key_that_is_another_by_the_time_it_is_accepted_is_not(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    unknown = await refused(bench, sshd)
    assert isinstance(unknown, HostKeyUnknown)
    sshd.new_host_key()
    sshd.restart()
    with pytest.raises(HostKeyChanged) as changed:
        await Engine(bench.home).nodes.accept_host_key(offer(unknown))
    assert (changed.value.expected, changed.value.shown) == (unknown.fingerprint, sshd.fingerprint)
    assert not (bench.home / "known_hosts").exists()
    assert json.loads((bench.home / "audit.jsonl").read_text())["status"] == "refused"


@pytest.mark.parametrize("algorithm", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
async def test_a_changed_key_is_refused_with_both_fingerprints(bench: SshBench, algorithm: str) -> None:
    sshd = bench.sshd()
    before = sshd.fingerprint
    sshd.new_host_key(algorithm)
    sshd.restart()
    changed = await refused(bench, sshd)
    assert isinstance(changed, HostKeyChanged)
    assert (changed.expected, changed.shown) == (before, sshd.fingerprint)
    assert before in str(changed)
    assert changed.todo is not None and f"-R '[{LOOPBACK}]:{sshd.port}' -f {bench.home}/known_hosts`" in changed.todo
    assert sshd.fingerprint in str(changed)


async def test_a_revoked_key_is_refused(bench: SshBench) -> None:
    sshd = bench.sshd()
    bench.know(f"@revoked * {public(sshd.host_key)}\n")
    error = await refused(bench, sshd)
    assert not isinstance(error, HostKeyUnknown)
    assert "revoked" in str(error)


async def test_the_users_own_hashed_known_hosts_count_and_bad_lines_in_them_do_not(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    theirs = bench.user_home / ".ssh" / "known_hosts"
    theirs.write_text("# mine\nnonsense\n|1|bad|hash ssh-ed25519 AAAA\nhost ssh-new AAAA\n@what x ssh-rsa AAAA\n")
    with theirs.open("a") as file:
        file.write(hashed(f"[{LOOPBACK}]:{sshd.port}", sshd))
    assert (await bench.to(sshd).run(["true"], timeout_s=5)).code == 0


def hashed(name: str, sshd: Sshd) -> str:
    """As `ssh-keygen -H` writes it."""
    salt = b"x" * 20
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()} {public(sshd.host_key)}\n"


async def test_a_known_hosts_file_that_the_configuration_names_counts(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    (bench.folder / "lab_hosts").write_text(sshd.known)
    bench.configure(f"Host *\n    UserKnownHostsFile {bench.folder / 'lab_hosts'}")
    assert (await bench.to(sshd).run(["true"], timeout_s=5)).code == 0


async def test_no_configuration_switches_the_check_off(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    bench.configure("Host *\n    UserKnownHostsFile none\n    GlobalKnownHostsFile none\n    StrictHostKeyChecking no")
    assert isinstance(await refused(bench, sshd), HostKeyUnknown)


@pytest.mark.parametrize("algorithm", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
async def test_another_ports_key_of_the_same_address_makes_this_one_no_changed_one(
    bench: SshBench, algorithm: str
) -> None:
    sshd = bench.sshd(known=False)
    bench.know(f"{LOOPBACK} {public(asyncssh.generate_private_key(algorithm))}\n")
    assert isinstance(await refused(bench, sshd), HostKeyUnknown)


async def test_a_key_is_known_by_its_alias(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    bench.alias("ana", sshd, "HostKeyAlias ana.lab")
    with pytest.raises(HostKeyUnknown) as unknown:
        await bench.to("ana").run(["true"], timeout_s=5)
    assert unknown.value.target == "ana"
    await Engine(bench.home).nodes.accept_host_key(offer(unknown.value))
    assert (bench.home / "known_hosts").read_text() == f"ana.lab {public(sshd.host_key)}\n"
    assert (await bench.to("ana").run(["true"], timeout_s=5)).code == 0


def certified(bench: SshBench, sshd: Sshd) -> asyncssh.SSHKey:
    """Give the sshd a certificate of a CA, which is returned."""
    ca = asyncssh.generate_private_key("ssh-ed25519")
    certificate = ca.generate_host_certificate(sshd.host_key, "node", principals=[LOOPBACK])
    file: Path = sshd.folder / "host_key-cert.pub"
    certificate.write_certificate(file)
    sshd._options["HostCertificate"] = str(file)
    sshd.restart()
    return ca


async def test_a_certificate_of_a_trusted_authority_vouches_for_the_key(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    bench.know(f"@cert-authority [{LOOPBACK}]:* {public(certified(bench, sshd))}\n")
    assert (await bench.to(sshd).run(["true"], timeout_s=5)).code == 0


async def test_below_a_certificate_of_nobody_known_the_plain_key_decides(bench: SshBench) -> None:
    sshd = bench.sshd(known=False)
    certified(bench, sshd)
    unknown = await refused(bench, sshd)
    assert isinstance(unknown, HostKeyUnknown)
    assert unknown.fingerprint == sshd.fingerprint
    bench.know(sshd.known)
    assert (await bench.to(sshd).run(["true"], timeout_s=5)).code == 0
