"""What CONTRIBUTING.md says to write works as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.content import Content

from engine.checks import connectivity
from engine.checks.check import Check, Findings
from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.cluster.transport.fleet import Fleet
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.failures.signature import Citation, Provenance, Signature
from engine.failures.signatures import SIGNATURES
from engine.models import CheckResult, CheckStatus
from tests.docs.generate import ROOT
from tui.state import DeckState
from tui.widgets.pane import Pane
from tui.widgets.text import Text

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]


def code(heading: str) -> str:
    """The first block of code below a heading."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", section(heading), re.MULTILINE)
    return textwrap.dedent(next(block for block in blocks if block.strip())).strip("\n")


def executed(source: str, **names: object) -> dict[str, Any]:
    namespace: dict[str, Any] = dict(names)
    exec(source, namespace)
    return namespace


async def test_the_check_runs(tmp_path: Path) -> None:
    names = {"Check": Check, "Findings": Findings, "CheckContext": CheckContext, "CheckResult": CheckResult}
    check = executed(code("Add a check"), **names)["CHECK"]
    node = NodeConfig(name="here", python="/usr/bin/python3", workdir=str(tmp_path))
    config = Config(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="job", command=("true",)))
    async with Fleet(tmp_path) as fleet:
        context = CheckContext(config, fleet)
        try:
            checks = {each.name: each for each in (connectivity.CHECK, check)}
            report = await run_checks(context, on_result=lambda _: None, checks=checks, audit=lambda *_: None)
        finally:
            await context.close()
    assert (report.checks[-1].name, report.checks[-1].status) == ("os_version", CheckStatus.PASS)


def test_the_failure_signature_matches_its_example_and_no_other() -> None:
    names = {"Signature": Signature, "Citation": Citation, "Provenance": Provenance}
    signature = executed(f"made = {code('Add a failure signature')}", **names)["made"]
    assert signature.id not in {known.id for known in SIGNATURES}
    matching = [known.id for known in (*SIGNATURES, signature) if re.search(known.pattern, signature.example)]
    assert matching == [signature.id]


async def test_the_screen_is_drawn() -> None:
    names = {"Pane": Pane, "ComposeResult": ComposeResult, "Text": Text, "DeckState": DeckState, "Content": Content}
    pane = executed(code("Add a screen"), **names)["AuditPane"]()

    class Alone(App[None]):
        def compose(self) -> ComposeResult:
            yield pane

    async with Alone().run_test():
        pane.show(DeckState(fault="nothing there"))
        assert pane.text() == "nothing there"
        assert str(pane.query_one(Text).render()) == "nothing there"


@pytest.mark.parametrize("heading", ["Add a check", "Add a failure signature", "Add a screen"])
def test_ten_lines_are_enough(heading: str) -> None:
    """Of prose and code together."""
    lines = [line for line in section(heading).splitlines() if line.strip()]
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 120
