"""`flightdeck environments` on nodes that have a python and reach no package index."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.tui.commands import flightdeck
from tests.wheels import write_wheel

NAMES = ("ana", "bea")


@pytest.fixture
def studio(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of two nodes without an interpreter, and the wheels that it needs."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    write_wheel(tmp_path / "wheels", "tiny", "1.0", ["tinydep>=2"])
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", "tinydep", version)
    tables = [f'[[node]]\nname = "{name}"\nssh = "{name}"\npython = "~/none/bin/python"  # its own\n' for name in NAMES]
    environment = '[environment]\nrequirements = ["tiny==1.0"]\nwheels = "wheels"'
    (tmp_path / "flightdeck.toml").write_text("\n".join([*tables, '[job]\ncommand = ["true"]', environment, ""]))
    return tmp_path


def test_one_is_made_on_each_node_from_wheels_and_used_and_removed(cluster: Cluster, home: Path, studio: Path) -> None:
    planned = flightdeck(home, "environments", "make", "--json", cwd=studio)
    (name,) = set(re.findall(r"environments/([0-9a-f]{16})/", planned.err))
    assert planned.code == 2 and "add --yes" in planned.err
    # What was interrupted is no environment, and is made anew.
    folder = cluster["ana"].disk.seen_from_head(f"~/.flightdeck/environments/{name}")
    cluster["ana"].write(f"~/.flightdeck/environments/{name}/bin/python", "", mode=0o644)
    made = flightdeck(home, "environments", "make", "--yes", "--json", cwd=studio)
    assert made.code == 0, made.err
    document = json.loads(made.out)
    python = f"~/.flightdeck/environments/{name}/bin/python"
    assert document["pythons"] == dict.fromkeys(NAMES, python)
    assert (studio / "flightdeck.toml").read_text().count(f'python = "{python}"  # its own\n') == len(NAMES)
    for node in map(cluster.__getitem__, NAMES):
        path = node.disk.seen_from_head(python)
        assert path.exists() and not path.parents[1].with_name(f"{name}.wheels").exists()
        ask = [python.replace("~", node.home), "-c", "import tiny, tinydep; print(tiny.version, tinydep.version)"]
        assert node.run(ask).stdout.split() == ["1.0", "2.0"]
    refused = flightdeck(home, "environments", "remove", name, "--yes", cwd=studio)
    assert refused.code == 2 and "flightdeck.toml names it" in refused.err
    text = (studio / "flightdeck.toml").read_text()
    (studio / "flightdeck.toml").write_text(text.replace(python, "~/none/bin/python"))
    assert flightdeck(home, "environments", "remove", name, "--yes", cwd=studio).code == 0
    assert not folder.exists()
