"""That mlx-lm can be imported is shown by an import or by proof that one would read the same files as the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.keeper_runner import stage_bundle


class FakeNode:
    """A home with a node root, and an mlx-lm of two files that counts its imports."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        (self.home / ".flightdeck").mkdir(parents=True)
        self.packages = folder / "packages"
        self.package = self.packages / "mlx_lm"
        self.package.mkdir(parents=True)
        self.count = folder / "count"
        self.bundle = stage_bundle(folder / "bundle")
        inside = f"open({str(self.count)!r}, 'a').write('.')\nfrom .part import *\n__version__ = '0.32.2'\n"
        (self.package / "__init__.py").write_text(inside)
        (self.package / "part.py").write_text("")

    def asked(self, how: str = "import") -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "engine.node.probes", "mlx_lm", how, "mlx_lm"],
            cwd=self.bundle,
            env={**os.environ, "HOME": str(self.home), "PYTHONPATH": str(self.packages)},
            capture_output=True,
            check=True,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    @property
    def imports(self) -> int:
        return len(self.count.read_text()) if self.count.exists() else 0


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def test_the_second_time_unchanged_files_prove_what_the_first_has_found(node: FakeNode) -> None:
    first, second = node.asked(), node.asked()
    assert (first["versions"], "proved" in first) == ({"mlx_lm": "0.32.2"}, False)
    assert (second["versions"], second["proved"] > 0, node.imports) == (first["versions"], True, 1)


def test_whatever_changes_is_imported_anew(node: FakeNode) -> None:
    node.asked()
    (node.package / "part.py").write_text("x = 1\n")
    assert ("proved" in node.asked(), node.imports) == (False, 2)
    # Something that may come first on the path from now on.
    (node.packages / "numpy.py").write_text("")
    assert ("proved" in node.asked(), node.imports) == (False, 3)
    assert ("proved" in node.asked(), node.imports) == (True, 3)


def test_a_file_that_is_gone_is_told_and_proves_nothing(node: FakeNode) -> None:
    node.asked()
    (node.package / "part.py").unlink()
    for _ in range(2):
        assert "No module named 'mlx_lm.part'" in node.asked()["errors"]["mlx_lm"]


def test_a_proof_that_makes_no_sense_is_none(node: FakeNode) -> None:
    node.asked()
    (proof,) = (node.home / ".flightdeck" / "imports").iterdir()
    for nonsense in ("", "[]", "{}", '{"surroundings": {}, "files": [], "mlx_lm": "9.9"}', "\0"):
        proof.write_text(nonsense)
        assert node.asked()["versions"] == {"mlx_lm": "0.32.2"}


def test_without_a_node_root_nothing_is_written_into_a_home(node: FakeNode) -> None:
    (node.home / ".flightdeck").rmdir()
    assert [node.asked()["versions"], node.asked()["versions"]] == [{"mlx_lm": "0.32.2"}] * 2
    assert (list(node.home.iterdir()), node.imports) == ([], 2)
