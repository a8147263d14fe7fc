"""A node: a machine, and everything that can be done to it. Each fault is undone by its counterpart, or all by `heal`.

All methods are synchronous; none takes longer than its tool, or than the condition that it awaits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from tests.cluster import faults, network, sshd
from tests.cluster.command import attempt, command
from tests.cluster.faults import Traffic
from tests.cluster.machine import Machine, until

NOISE = """
echo "Welcome to this Mac."
printf '\\033[31mLast backup: never\\033[0m\\n'
echo "reminder: update homebrew" >&2
"""


class Node(Machine):
    """One node of a cluster, with its faults."""

    _harmed: frozenset[str] = frozenset()

    def heal(self, *, all_faults: bool = False) -> None:
        """Undo every fault that this object caused, or, `all_faults`, all there may be. What runs there runs on."""
        harmed = set(self._undoings) if all_faults else self._harmed
        for harm, undo in self._undoings.items():
            if harm in harmed:
                undo()

    @property
    def _undoings(self) -> dict[str, Callable[[], None]]:
        return {
            "power": self.power_on,
            "asleep": self.wake,
            "link": self.link_up,
            "filter": self.flush_rules,
            "speed": self.full_speed,
            "disk": self.free_disk,
            "noise": self.quiet_bashrc,
            "frozen": self.thaw_sshd,
            "sshd": self.default_sshd,
        }

    def power_on(self) -> None:
        """Boot the node if it is off, and await its sshd. Its disks are as they were, its boot id is a new one."""
        if self.pid is None:
            self.boot()
            self.await_sshd()
        self._healed("power")

    def power_off(self) -> None:
        """Pull the plug: no FIN, no last words, every process gone when this returns."""
        self._harm("power")
        self.pull_the_plug()
        # Rules, speed and a frozen sshd went with the kernel's state.
        for harm in ("asleep", "link", "filter", "speed", "frozen"):
            self._healed(harm)

    def sleep(self) -> None:
        """Stop every process on the node, as a Mac's sleep does; its kernel still takes what is sent."""
        self._harm("asleep")
        self._signal_all("STOP")

    def wake(self) -> None:
        """Undo sleep."""
        self._signal_all("CONT")
        self._healed("asleep")

    def cut(self, traffic: Traffic = Traffic.EVERYTHING, peer: str | None = None) -> None:
        """Let all packets of `traffic` vanish both ways: a black hole. `peer` is one other address; else everybody."""
        self._filter(faults.drop(traffic, peer))

    def lossy(self, share: float = 0.2, traffic: Traffic = Traffic.EVERYTHING, peer: str | None = None) -> None:
        """Lose this share of the packets each way."""
        self._filter(faults.lose(share, traffic, peer))

    def reject(self, traffic: Traffic = Traffic.SSH, peer: str | None = None) -> None:
        """Answer every TCP packet with a reset, new connections and old."""
        self._filter(faults.reject(traffic, peer))

    def flush_rules(self) -> None:
        """Undo cut, lossy and reject."""
        self._as_root("iptables-restore", stdin=faults.NO_RULES)
        self._healed("filter")

    def reset_ssh(self) -> None:
        """Reset every ssh connection of the node, now and once; new ones are let in."""
        self._as_root("ss", "--tcp", "--kill", "state", "established", f"sport = :{self.port}")

    def link_down(self) -> None:
        """Pull the network cable."""
        self._harm("link")
        network.set_link(self._cluster, self._index, up=False)

    def link_up(self) -> None:
        """Plug the network cable in again."""
        network.set_link(self._cluster, self._index, up=True)
        self._healed("link")

    def slow_link(self, rate: str = "10mbit") -> None:
        """Send and receive no faster than `rate`, as tc writes it (1mbit is a million bits a second)."""
        self._harm("speed")
        self._as_root(*faults.throttle("eth0", rate))
        command(*faults.throttle(network.port_of(self._cluster, self._index), rate))

    def full_speed(self) -> None:
        """Undo slow_link."""
        attempt(*self.inside(), *faults.unthrottle("eth0"))
        attempt(*faults.unthrottle(network.port_of(self._cluster, self._index)))
        self._healed("speed")

    def fill_disk(self, leave: int = 0) -> None:
        """Leave `leave` bytes free on the disk of the user's home."""
        self._harm("disk")
        self.disk.fill(leave)

    def free_disk(self) -> None:
        """Undo fill_disk."""
        self.disk.free()
        self._healed("disk")

    def noisy_bashrc(self, text: str = NOISE) -> None:
        """Let the user's shell say things before every command."""
        self._harm("noise")
        self.write("~/.bashrc", text)

    def quiet_bashrc(self) -> None:
        """Undo noisy_bashrc."""
        self.disk.seen_from_head("~/.bashrc").unlink(missing_ok=True)
        self._healed("noise")

    def stop_sshd(self) -> None:
        """End the sshd that listens; sessions that are open live on."""
        self._harm("sshd")
        self._signal_sshd("TERM")
        until(self._refused, f"the end of {self.name}'s sshd", str)

    def start_sshd(self) -> None:
        """Start sshd if none listens, and await its greeting."""
        if self._refused():
            self._as_root(sshd.BINARY, "-E", sshd.LOG)
        self.await_sshd()

    def freeze_sshd(self) -> None:
        """Let the node accept TCP on the ssh port and say nothing; sessions that are open live on."""
        self._harm("frozen")
        self._signal_sshd("STOP")

    def thaw_sshd(self) -> None:
        """Undo freeze_sshd."""
        self._signal_sshd("CONT")
        self._healed("frozen")

    def configure_sshd(self, **options: str | int) -> None:
        """Restart sshd with these options of sshd_config (MaxStartups="2:50:4", MaxSessions=3) beside the usual."""
        self._harm("sshd")
        (self.sshd_folder / sshd.CONFIG_NAME).write_text(self._sshd_config({k: str(v) for k, v in options.items()}))
        self.restart_sshd()

    def change_host_key(self) -> str:
        """Restart sshd with another host key, as after a reinstallation, and return its public half. The client's
        known_hosts stays as it was."""
        self._harm("sshd")
        key = self.sshd_folder / sshd.KEY_NAME
        for file in (key, key.with_name(f"{key.name}.pub")):
            if not (kept := file.with_name(f"first-{file.name}")).exists():
                shutil.copy2(file, kept)
        new = sshd.make_key(key, f"{self.name}-again")
        self.restart_sshd()
        return new

    def restart_sshd(self) -> None:
        """Stop and start sshd; sessions that are open live on."""
        self.stop_sshd()
        self.start_sshd()

    def default_sshd(self) -> None:
        """Undo stop_sshd, configure_sshd and change_host_key."""
        key = self.sshd_folder / sshd.KEY_NAME
        for file in (key, key.with_name(f"{key.name}.pub")):
            if (kept := file.with_name(f"first-{file.name}")).exists():
                kept.replace(file)
        (self.sshd_folder / sshd.CONFIG_NAME).write_text(self._sshd_config({}))
        if not self._refused():
            self.stop_sshd()
        self.start_sshd()
        self._healed("sshd")

    def _filter(self, rules: Sequence[str]) -> None:
        self._harm("filter")
        self._as_root("iptables-restore", "--noflush", stdin=faults.inserted(rules))

    def _signal_all(self, name: str) -> None:
        # All but the node's pid 1 and this shell itself, kill(2).
        attempt(*self.inside(), "sh", "-c", f"kill -{name} -1")

    def _signal_sshd(self, name: str) -> None:
        # Not `command`: an sshd that is not there needs no signal.
        attempt(*self.inside(), "sh", "-c", f'kill -{name} "$(cat {sshd.PID_FILE})"')

    def _refused(self) -> bool:
        """True if nobody listens on the ssh port, asked from the node itself, where no fault of the network is."""
        listening = self._as_root("ss", "--no-header", "--tcp", "--listening", "--numeric", f"sport = :{self.port}")
        return not listening.strip()

    def _harm(self, kind: str) -> None:
        self._harmed |= {kind}

    def _healed(self, kind: str) -> None:
        self._harmed -= {kind}
