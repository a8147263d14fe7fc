"""Where ssh's facts lie on the head: the configuration, and the known_hosts files, ours first."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_VARIABLE = "FLIGHTDECK_SSH_CONFIG"
"""An ssh_config to use in place of ~/.ssh/config and /etc/ssh/ssh_config."""


def own_known_hosts(home: Path) -> Path:
    """The host keys that were accepted in Flight Deck, in the state directory `home`."""
    return home / "known_hosts"


def ssh_configs() -> list[Path]:
    """The ssh_config files that count, the first word on a thing wins; only those that are there."""
    given = os.environ.get(CONFIG_VARIABLE)
    files = [Path(given).expanduser()] if given else [Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")]
    return [file for file in files if file.is_file()]


def known_hosts_files(home: Path, configured: list[str] | None = None) -> list[Path]:
    """The known_hosts files that count, of those that are there; `configured` are ssh_config's own, in place of the
    user's and the system's usual ones."""
    usual = ["~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
    files = [own_known_hosts(home), *(Path(name).expanduser() for name in (configured or usual))]
    return [file for file in files if file.is_file()]
