"""The shape of the code: no cycles, no twins, no growth, the field's words, and flows that the document tells truly."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture.report import Code, Module, flows, kind_conditions, large_classes, long_functions

CODE = Code(Path(__file__).parents[2])
TESTS = Code(CODE.repository, ("tests",))
FLOWS = flows(CODE.repository)
MOST_FILES, MOST_LINES = 351, 68_935
"""Limits of the engine, lowered when it shrinks, and raised only with what an issue adds."""
NAMELESS = ("found", "each", "known", "own", "it")
"""Names that do not say what they hold: no parameter or variable has one."""
MOST_KIND_CONDITIONS = 37
"""Conditions on the kind of a job outside of its own types, which answer by name; only lowered."""
DIALECT = {
    *("Flight", "FlightConfig", "fly", "bring_home", "stumble", "look", "looks", "Desk", "Scene", "survey", "Room"),
    *("face", "faces", "told", "said", "heard", "beat", "beats", "Rescue", "culprit", "judging", "Witnesses", "Signs"),
    *("Remnants", "inheritance", "Sighting", "last_words", "Ways", "Wiring", "wiring", "Situation", "Outlook"),
    *("judgement", "mend", "mending", "cures", "stand_in", "_part", "look_at_own", "keep_up", "owes", "all_home"),
    *("hurry", "run_story", "plan_story", "tidying", "flown", "Flown", "wirings", "situation", "surveyed", "mended"),
    *("take_over", "thorough", "Copies", "Conditions", "Evidence", "Notes", "Place", "scene", "looked"),
}
"""Names of an earlier vocabulary. The field says probe, message, reported, received, heartbeat, fix, first_failure."""
FORMER = re.compile(rf"\b_*({'|'.join(sorted(DIALECT))})\b")
OPENINGS = re.compile(r"(Of|What|Whether) |To be closed")
"""How no docstring begins: the subject comes first, and a question of a name needs no docstring."""


def package_of(module: Module) -> str:
    """For example engine.run, engine.models or tui."""
    parts = module.name.split(".")
    return parts[0] if parts[0] == "tui" else ".".join(parts[:2])


PACKAGES = sorted({package_of(module) for module in CODE.modules.values()})


def modules_of(package: str) -> list[Module]:
    return [module for module in CODE.modules.values() if package_of(module) == package]


def test_no_module_imports_itself_over_others() -> None:
    assert CODE.cycles() == []


def test_no_public_class_name_occurs_twice() -> None:
    assert CODE.twins() == {}


def test_no_basename_of_a_module_occurs_in_more_than_two_packages() -> None:
    packages: dict[str, set[Path]] = {}
    for module in CODE.below("engine"):
        if not module.path.stem.startswith("__"):
            packages.setdefault(module.path.name, set()).add(module.path.parent.relative_to(CODE.repository))
    assert {name: folders for name, folders in packages.items() if len(folders) > 2} == {}


def test_the_engine_does_not_grow() -> None:
    engine = CODE.below("engine")
    assert len(engine) <= MOST_FILES
    assert sum(module.lines for module in engine) <= MOST_LINES


def test_functions_are_short() -> None:
    assert list(long_functions(CODE)) == []


def test_classes_of_the_head_are_small() -> None:
    assert list(large_classes(CODE)) == []


def test_the_kind_of_a_job_answers_for_itself() -> None:
    conditions = list(kind_conditions(CODE))
    assert len(conditions) <= MOST_KIND_CONDITIONS, "\n".join(conditions)


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_names_are_the_fields(package: str) -> None:
    modules = list(TESTS.modules.values()) if package == "tests" else modules_of(package)
    assert {module.name: found for module in modules if (found := former_names(module))} == {}


def former_names(module: Module) -> set[str]:
    """A name with leading underscores is compared without them, too."""
    if not FORMER.search(module.text):  # Parsing all tests takes seconds.
        return set()
    return {name for name in module.identifiers if {name, name.lstrip("_")} & DIALECT}


@functools.cache
def variables_of_functions() -> list[tuple[str, set[str]]]:
    """Each function's package, and its parameters and variables."""
    return [(package_of(module), variables(node)) for module in CODE.modules.values() for node in module.functions]


@pytest.mark.parametrize("name", NAMELESS)
def test_variables_say_what_they_hold(name: str) -> None:
    assert Counter(package for package, names in variables_of_functions() if name in names) == {}


def variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters and variables, with those of lambdas and comprehensions; without those of functions defined within."""
    names, nodes = set[str](), [*ast.iter_child_nodes(function)]
    while nodes:
        match node := nodes.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case _:
                pass
        nodes += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_their_subject(package: str) -> None:
    found = [(module.name, text[:60]) for module in modules_of(package) for text in module.docstrings]
    assert [each for each in found if OPENINGS.match(each[1])] == []


def test_the_document_tells_the_flows() -> None:
    assert {"A log line", "A fix"} <= FLOWS.keys()


@pytest.mark.parametrize("title", FLOWS)
def test_each_step_of_a_flow_leads_to_the_next(title: str) -> None:
    steps = FLOWS[title]
    assert [step.path for step in steps if step.module not in CODE.modules] == []
    assert [(one.path, two.path) for one, two in pairwise(steps) if CODE.connection(one, two) is None] == []


def test_the_docstring_of_a_package_says_what_it_holds() -> None:
    packages = [module for module in CODE.modules.values() if module.path.name == "__init__.py"]
    assert [module.name for module in packages if ast.get_docstring(module.tree) is None] == []
