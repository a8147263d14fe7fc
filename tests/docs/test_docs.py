"""The documentation is true: its commands parse, its links lead somewhere, its generated parts are up to date."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.cluster.__main__ import parser as cluster_parser
from tests.docs.generate import ROOT, generated
from tui.cli import command_parser

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = {"README.md": 900, "docs/architecture.md": 2_200}
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
FORMER_WORDS = re.compile(
    r"\b(?:mend(?:s|ed|ing)?|cures?|culprit|remnants|witnesses|sighting|wiring|rescue[sd]?|judgement|"
    r"(?:preflight|training|console|planning|product)\.md)\b",
    re.IGNORECASE,
)
"""Words that the project no longer uses (its names are those of the field), and documents that it never had."""


class Parsed(Exception):
    """A module has parsed its command line."""


def commands(document: Path) -> Iterator[str]:
    """The command lines of a document: in its code blocks, and between backticks."""
    for code in [*_code_lines(document.read_text(encoding="utf-8")), *INLINE.findall(_prose(document))]:
        for part in re.split(r"&&|\||(?<![<>])>|;", re.sub(r"\s+#.*|\s{2,}.*", "", code.strip())):
            words = part.strip().removeprefix("uv run ").strip()
            if re.match(r"(flightdeck|python -m|pytest)( |$)", words):
                yield words


def _code_lines(text: str) -> list[str]:
    return [line for block in FENCED.findall(text) for line in block.splitlines()] + re.findall(
        r"^    (?! )(.+)$", FENCED.sub("", text), re.MULTILINE
    )


def _prose(document: Path) -> str:
    return re.sub(r"^    .+$", "", FENCED.sub("", document.read_text(encoding="utf-8")), flags=re.MULTILINE)


def every_command() -> list[Any]:
    found = {(document.name, command) for document in DOCUMENTS for command in commands(document)}
    return [pytest.param(command, id=f"{name}: {command}") for name, command in sorted(found)]


@pytest.mark.parametrize("command", every_command())
def test_a_command_line_is_accepted_by_the_real_parser(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    if program == "flightdeck":
        command_parser().parse_args(arguments)
    elif program == "pytest":
        _check_pytest(arguments)
    else:
        _check_module(arguments[1], arguments[2:], monkeypatch)


def _check_module(module: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    is_package = spec.submodule_search_locations is not None
    if module == "tests.cluster":
        cluster_parser().parse_args(options)
    elif options:
        parse = argparse.ArgumentParser.parse_args

        def parse_only(parser: argparse.ArgumentParser) -> NoReturn:
            parse(parser)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        monkeypatch.setattr(sys, "argv", [module, *options])
        with pytest.raises(Parsed):
            importlib.import_module(f"{module}.__main__" if is_package else module).main()


def _check_pytest(arguments: list[str]) -> None:
    with_value = {"-m": {"slow"}, "-n": {"0", "2"}, "-k": None}
    rest = iter(arguments)
    for argument in rest:
        if argument in with_value:
            values = with_value[argument]
            value = next(rest)
            assert values is None or value in values
        elif argument.startswith("-"):
            assert argument in {"--snapshot-update", "-q"}
        else:
            assert (ROOT / argument).exists()


def test_there_are_commands_to_check() -> None:
    assert {"flightdeck demo", "pytest"} <= set(commands(ROOT / "README.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        if anchor:
            assert anchor in {_anchor(text) for text in HEADING.findall(linked.read_text(encoding="utf-8"))}, target


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == generated(text), "run: uv run python -m tests.docs.generate"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_named_is_there(document: Path) -> None:
    """Files of the repository between backticks, as in `engine/run/supervisor.py`."""
    for code in INLINE.findall(_prose(document)):
        if re.fullmatch(r"(?:engine|tui|tests|docs)/[\w/.-]*", code):
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("name", [".ci/run", ".pre-commit-config.yaml"])
def test_the_files_that_ci_and_pre_commit_read_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_former_words_are_gone(document: Path) -> None:
    assert FORMER_WORDS.findall(document.read_text(encoding="utf-8")) == []


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {str(document.relative_to(ROOT)) for document in DOCUMENTS[1:]} <= linked


@pytest.mark.parametrize("name", MOST_WORDS)
def test_a_page_that_is_read_whole_is_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) <= MOST_WORDS[name]


def test_code_refers_to_no_document_that_is_not_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("engine", "tui", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", path.read_text(encoding="utf-8"))
        if not any((ROOT / place / name).exists() for place in (".", "docs"))
    ]
    assert missing == []


def test_messages_in_the_troubleshooting_table_are_those_of_the_code() -> None:
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split("## Messages")[1]
    messages = [row.removesuffix("…").strip() for row in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    code = "".join(path.read_text("utf-8") for folder in ("engine", "tui") for path in (ROOT / folder).rglob("*.py"))
    written = re.sub(r"\{[^{}\n]*\}", "", code)
    assert messages
    assert [message for message in messages if message not in written] == []
