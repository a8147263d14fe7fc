"""Names what a configuration makes run, on this machine and on the nodes. Somebody else may have written it: a person
accepts it, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from pathlib import Path

from engine.config.models import Config, PreflightConfig
from engine.security.redact import is_public


def named_programs(config: Config, *, launch: bool) -> list[tuple[str, str]]:
    """Where or as what each runs, and its name: as soon as the nodes are asked and checks are made, and with `launch`
    also the command. Empty where the interpreter that runs flightdeck does all, on this machine and unchanged."""
    nodes = [node for node in config.nodes if not (node.local and node.python == sys.executable)]
    found = [("this machine" if node.local else node.ssh, node.python) for node in nodes]
    if launch and config.job.command is not None:
        found.append(("the command", shlex.join(config.job.command)))
    found += [("sync_script", str(path)) for path in _sync_script(config)]
    if config.job.mlx_lm.get("trust_remote_code"):
        found += [("the model's own code", f"{node.model} (trust_remote_code)") for node in config.nodes]
    # Among them may be LD_PRELOAD and PYTHONPATH.
    if variables := [name for name in config.job.env if not is_public(name) or name.endswith("PLUGIN")]:
        found.append(("with the variables", ", ".join(variables)))
    return list(dict.fromkeys(found))


def _sync_script(config: Config) -> list[Path]:
    """The script, if it is there and another than the usual one."""
    script = config.preflight.sync_script
    # Such as ~nobody, or below a folder of another user: it is not run either.
    with contextlib.suppress(RuntimeError, OSError):
        path = Path(script).expanduser()
        return [path] * (script != PreflightConfig().sync_script and path.is_file())
    return []


def content_digest(config: Config, *texts: str) -> str:
    """SHA-256 of the `texts` of the configuration's files, and of what they name that runs here before a launch."""
    digest, files = hashlib.sha256("".join(texts).encode()), _sync_script(config)
    if config.job.mlx_lm.get("trust_remote_code"):
        # The YAML may set both.
        digest.update(f"trust_remote_code {config.job.model}".encode())
        folders = {Path(node.model) for node in config.nodes if node.local and node.model is not None}
        files += sorted(file for folder in folders for depth in ("*.py", "*/*.py") for file in folder.glob(depth))
    for file in files:
        # A FIFO would be waited for.
        with contextlib.suppress(OSError):
            digest.update(str(file).encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()
