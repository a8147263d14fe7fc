"""Programs and abilities that some tests need. Where one is missing the test is skipped, and in CI it fails.

Run as a program it prints the Debian packages that this machine lacks; with the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "g++": "g++",  # MLX's CPU build compiles fused kernels with it (stock mlx_lm.lora)
    "mount": "mount",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "ip": "iproute2",
    "ss": "iproute2",
    "tc": "iproute2",
    "iptables-restore": "iptables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "ps": "procps",
    "zsh": "zsh",  # login shells that the user of a node may have
    "dash": "dash",
    "fish": "fish",
    "tcsh": "tcsh",
    "bsdtar": "libarchive-tools",  # macOS's tar
    "chromium-headless-shell": "chromium-headless-shell",
}
"""Program -> the Debian package that has it."""
PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/local/sbin:/usr/sbin:/sbin"
"""Where a program is looked for: also where only root usually looks."""

TORCH = Path(__file__).parents[1] / ".venv-torch" / "bin" / "python"
"""A node's python with PyTorch, which `.ci/run` makes."""
FOREIGN = TORCH.parents[2] / ".venv-foreign" / "bin" / "python"
"""A node's python with tests/foreign/requirements.txt."""
RECORDINGS = Path(__file__).parents[2] / "shared" / "fixtures"


def required() -> bool:
    """In CI nothing may be skipped."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def require(*wanted: str) -> None:
    """Skip the running test, or the module, where a program (of PACKAGES) or an ability (of ABILITIES) is missing; in
    CI, fail it.

    Called by hooks, not by fixtures, which pytest would report at each test: so `-rs` prints one line per cause.
    """
    reason = next(filter(None, map(missing, wanted)), None)
    if reason:
        # The main program below runs without pytest.
        import pytest

        if required():
            pytest.fail(f"needs {reason}", pytrace=False)
        pytest.skip(f"needs {reason}", allow_module_level=True)


@cache
def missing(name: str) -> str | None:
    """What a person has to provide for `name`; None where it is there."""
    if name in ABILITIES:
        return ABILITIES[name]()
    return None if shutil.which(name, path=PATH) else f"{name} (apt install {PACKAGES[name]})"


def _linux() -> str | None:
    return None if sys.platform.startswith("linux") else "Linux"


def _tmpfs() -> str | None:
    if lacks := _linux() or missing("root") or missing("mount") or missing("unshare"):
        return lacks
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    allowed = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    return None if allowed else "a machine that lets root mount a tmpfs"


def _namespaces() -> str | None:
    from tests.cluster import capability

    return capability.missing()


ABILITIES: dict[str, Callable[[], str | None]] = {
    "linux": _linux,
    "root": lambda: None if os.geteuid() == 0 else "root",
    "tmpfs": _tmpfs,
    "namespaces": _namespaces,
    "torch": lambda: None if TORCH.exists() else f"PyTorch in {TORCH.parents[1]} (CONTRIBUTING.md says how)",
    "foreign": lambda: (
        None if FOREIGN.exists() else f"trl, Lightning and lm-eval in {FOREIGN.parents[1]} (CONTRIBUTING.md says how)"
    ),
    "trackers": lambda: None if all(map(find_spec, ("wandb", "tensorboard"))) else "wandb and tensorboard (uv sync)",
    "recordings": lambda: None if RECORDINGS.is_dir() else f"the recordings of Macs in {RECORDINGS}",
}
"""Name -> a function that returns what is missing, or None."""


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """`folder`, which is made, with a tmpfs of `size` (as mount writes it) on it. For tests that need "tmpfs"."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    print(*sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)}))
