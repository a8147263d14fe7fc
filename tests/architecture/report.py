"""The shape of the code in figures: `uv run python -m tests.architecture.report [--repo DIR]`, also on an old checkout.

Only the source is read, nothing is imported, so that any version can be measured.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

PACKAGES = ("engine", "tui")
SHORT = 60
"""A file with fewer lines is short."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
STEP = re.compile(r"\d+\. `(?P<path>[\w/]+\.py)`: (?P<text>.+)")
STARTS_PROCESS = "starts a process"
MOST_FUNCTION_LINES, MOST_ATTRIBUTES, MOST_METHODS = 50, 15, 25
"""Of a function from its first line to its last, and of a class of the head."""
NODE_SIDE = ("engine.node.", "engine.protocol.", "engine.training.", "engine.trainer.", "engine.torch_trainer.")
"""What runs on the nodes; the head is the rest."""
CHAIN = 3
"""A frontend calls an engine's part over `engine.api` and its Engine."""
MEETING_POINTS = ("engine.protocol.", "engine.store.layout", "engine.node.")
"""Two processes, or a writer and a reader of a file, are connected where both import the form of what they exchange."""


KIND = frozenset(
    {"framework", "elastic", "partitioned", "outlives_ranks", "torch", "reports", "is_command", "is_torch"}
)
"""Attributes that say of which kind a job is; so do `command` and `strategy` of a job."""
ANSWERS = re.compile(r"\bjob\.(kind|words)\b|\bFRAMEWORKS\b|\b(context|self)\.kind\b|\b(config|spec)\.(as_)?torchrun\b")
KIND_OWNERS = ("engine.job.", "engine.plan.torch.", "engine.trainer.", "engine.torch_trainer.", "tui.")
"""Where the kind of a job may be asked for: its own package, what is for one framework alone. The frontends have no
configuration."""


@dataclass(frozen=True)
class Module:
    name: str
    """Dotted, as it is imported; a package's own name for its `__init__`."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Lines that are neither blank nor wholly comment or docstring."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        spans = (range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in NO_CODE)
        return len({line for span in spans for line in span} - set(self._docstring_lines()))

    @cached_property
    def header_lines(self) -> int:
        """From the first line to the last of the leading docstring and imports."""
        last = 0
        for node in self.tree.body:
            kind_of_header = isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) or _is_type_checking(node)
            if not kind_of_header:
                break
            last = node.end_lineno or last
        return last

    @cached_property
    def public_classes(self) -> list[str]:
        return [node.name for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Functions and methods."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def public_functions(self) -> list[str]:
        return [node.name for node in self.functions if node.name[0] != "_"]

    @cached_property
    def docstrings(self) -> list[str]:
        """The docstrings of the module, its classes, functions, and fields."""
        return [str(ast.literal_eval(node.value)) for node in _texts(self.tree)]

    @cached_property
    def identifiers(self) -> set[str]:
        """Every name that the module defines: classes, functions, parameters, variables and attributes."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.arg(arg=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    pass
        return found

    def imports(self, known: Mapping[str, Module]) -> set[str]:
        """The modules of `known` that are imported anywhere in this one, for type checking alone too."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name for alias in names}
                case ast.ImportFrom(module=module, names=names, level=level):
                    base = self._base(module, level)
                    for alias in names:
                        whole = f"{base}.{alias.name}"
                        found.add(whole if whole in known else base)
                case _:
                    pass
        return {name for name in found if name in known} - {self.name}

    def _base(self, module: str | None, level: int) -> str:
        if not level:
            return module or ""
        parts = self.name.split(".")
        package = parts if self.path.name == "__init__.py" else parts[:-1]
        kept = package[: len(package) - (level - 1)]
        return ".".join([*kept, module] if module else kept)

    def _docstring_lines(self) -> Iterator[int]:
        for node in _texts(self.tree):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def attributes(node: ast.ClassDef) -> set[str]:
    """Its annotated fields, and what it assigns to `self`."""
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                fields.add(name)
            case _:
                pass
    return fields


def long_functions(code: Code) -> Iterator[str]:
    """The engine's functions over MOST_FUNCTION_LINES."""
    for module in code.below("engine"):
        for node in module.functions:
            if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES:
                yield f"{module.path.relative_to(code.repository)}:{node.lineno}: {node.name}, {lines} lines"


def large_classes(code: Code) -> Iterator[str]:
    """The head's classes over MOST_METHODS, or over MOST_ATTRIBUTES. A record, which never changes, has as many fields
    as its document or row has."""
    for module in code.below("engine"):
        for node in module.classes if not f"{module.name}.".startswith(NODE_SIDE) else []:
            methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
            count = 0 if code.is_record(node) else len(attributes(node))
            if methods > MOST_METHODS or count > MOST_ATTRIBUTES:
                where = f"{module.path.relative_to(code.repository)}:{node.lineno}"
                yield f"{where}: {node.name}, {count} attributes, {methods} methods"


def kind_conditions(code: Code, asks: Callable[[ast.AST], bool] | None = None) -> Iterator[str]:
    """The conditions outside of KIND_OWNERS for which `asks` holds, by default those on a job's kind: each outermost
    test, comparison, `and`, `or`, `not`, `match` or product with a truth value, as "file:line: source"."""
    for module in code.modules.values():
        if not f"{module.name}.".startswith(KIND_OWNERS):
            seen: set[ast.AST] = set()
            for node in ast.walk(module.tree):
                for condition in _conditions(node):
                    if condition not in seen and (asks or _asks_kind)(condition):
                        yield f"{module.path.relative_to(code.repository)}:{condition.lineno}: {ast.unparse(condition)}"
                    seen |= set(ast.walk(condition))


def _conditions(node: ast.AST) -> Sequence[ast.expr]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
            return [test]
        case ast.comprehension(ifs=tests):
            return tests
        case ast.Match(subject=subject, cases=cases):
            return [subject, *(case.guard for case in cases if case.guard is not None)]
        case ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.BinOp(op=ast.Mult()):
            return [node]
        case _:
            return []


def _asks_kind(node: ast.AST) -> bool:
    """It mentions the kind itself, and not only what follows from it (`kind.framework.tcp_backend`)."""
    match node:
        case ast.Attribute(value=ast.Name(id="fact" | "facts")) | ast.Subscript(slice=ast.Attribute(attr="framework")):
            return False
        case ast.Attribute(value=ast.Name(id="job" | "spec") | ast.Attribute(attr="job" | "_spec"), attr="command"):
            return True
        case ast.Compare(
            left=ast.Attribute(value=ast.Name(id="job") | ast.Attribute(attr="job"), attr="strategy"),
            comparators=[ast.Constant() | ast.Tuple() | ast.Name(id="PARTITIONED")],
        ):
            return True
        case ast.Attribute(value=ast.Attribute(attr="framework", value=ast.Attribute(attr="kind") | ast.Name())):
            return node.attr in ("name", "title")
        case _:
            itself = isinstance(node, ast.Attribute) and node.attr in KIND
            return itself or any(map(_asks_kind, ast.iter_child_nodes(node)))


def _asks_answer(node: ast.AST) -> bool:
    """It mentions a property of the kind, of its framework or strategy, or the words of its command."""
    return ANSWERS.search(ast.unparse(node)) is not None


def _texts(tree: ast.AST) -> Iterator[ast.Expr]:
    """The statements that are a string alone: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


class Code:
    """The modules of one checkout."""

    def __init__(self, repository: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.repository = repository
        self.modules: dict[str, Module] = {}
        for path in sorted(path for package in packages for path in (repository / package).rglob("*.py")):
            parts = path.relative_to(repository).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, path.read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        return {name: module.imports(self.modules) for name, module in self.modules.items()}

    def is_record(self, node: ast.ClassDef) -> bool:
        """A frozen dataclass, a pydantic model with `frozen=True`, or a subclass of one."""
        bases = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
        settings = [*node.decorator_list, *(item.value for item in node.body if isinstance(item, ast.Assign))]
        frozen = any("frozen=True" in ast.unparse(setting) for setting in settings)
        return frozen or any(map(self.is_record, (base for base in self._classes if base.name in bases)))

    @cached_property
    def _classes(self) -> list[ast.ClassDef]:
        return [node for module in self.modules.values() for node in module.classes]

    def below(self, package: str) -> list[Module]:
        return [module for name, module in self.modules.items() if name.split(".")[0] == package]

    def twins(self) -> dict[str, list[str]]:
        """Public class name -> the modules that define it, where there are several."""
        homes = defaultdict(list)
        for module in self.modules.values():
            for name in module.public_classes:
                homes[name].append(module.name)
        return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}

    def function_counts(self) -> Counter[str]:
        return Counter(name for module in self.modules.values() for name in module.public_functions)

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or not."""
        reached = {name: self._reached(name) for name in self.modules}
        groups = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in self.modules
            if name in reached[name]
        }
        return [list(group) for group in sorted(groups)]

    def _reached(self, start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in self.imports[waiting.pop()] - found:
                found.add(name)
                waiting.append(name)
        return found

    def connection(self, step: FlowStep, after: FlowStep) -> str | None:
        """How a step leads to the one after it; None when the code shows no way."""
        one, two = step.module, after.module
        if one == two:
            return "the same file"
        if STARTS_PROCESS in step.text:
            return "a process"
        chain = self._import_chain(one, two) or self._import_chain(two, one)
        if chain:
            return "imports: " + " -> ".join(chain)
        packages = tuple(f"{name.rpartition('.')[0]}." for name in (one, two))
        if shared := {
            name for name in self.imports[one] & self.imports[two] if name.startswith(MEETING_POINTS + packages)
        }:
            return f"{min(shared)}, which both import"
        joins = {name for name, found in self.imports.items() if {one, two} <= found}
        return f"{min(joins)}, which imports both" if joins else None

    def _import_chain(self, start: str, end: str) -> list[str]:
        """The shortest chain of at most CHAIN imports from `start` to `end`, both included; empty for none."""
        chains = [[start]]
        for _ in range(CHAIN):
            chains = [[*chain, name] for chain in chains for name in sorted(self.imports[chain[-1]] - set(chain))]
            if found := next((chain for chain in chains if chain[-1] == end), None):
                return found
        return []


@dataclass(frozen=True)
class FlowStep:
    path: str
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def flows(repository: Path) -> dict[str, list[FlowStep]]:
    """The numbered flows of docs/architecture.md, by their titles; none in a checkout that has no such document."""
    document = repository / "docs" / "architecture.md"
    found: dict[str, list[FlowStep]] = {}
    if not document.exists():
        return found
    chapter = document.read_text(encoding="utf-8").partition("\n## Flows\n")[2].partition("\n## ")[0]
    for part in chapter.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        found[title] = [FlowStep(match["path"], match["text"]) for match in map(STEP.match, body.splitlines()) if match]
    return found


def report(code: Code) -> Iterator[str]:
    """The lines that are printed."""
    for package in PACKAGES:
        modules = code.below(package)
        lines, code_lines = sum(module.lines for module in modules), sum(module.code_lines for module in modules)
        header = sum(module.header_lines for module in modules)
        yield (
            f"{package}: {len(modules)} files, {lines:,} lines, {code_lines:,} of code; "
            f"header {header / max(1, lines):.0%} ({header / max(1, len(modules)):.0f} lines a file); "
            f"{sum(module.lines < SHORT for module in modules)} files under {SHORT} lines"
        )
    longest = sorted(code.modules.values(), key=lambda module: -module.lines)[:8]
    yield "longest: " + ", ".join(f"{module.path.relative_to(code.repository)} {module.lines}" for module in longest)
    yield f"public class names that occur twice: {len(code.twins())}"
    for name, modules_of in code.twins().items():
        yield f"  {name}: {', '.join(modules_of)}"
    for name, texts in (("functions", long_functions(code)), ("classes", large_classes(code))):
        above = list(texts)
        yield f"{name} over the limit: {len(above)}"
        yield from (f"  {text}" for text in above)
    conditions = list(kind_conditions(code))
    by_package = Counter("/".join(text.split("/")[:2]) for text in conditions)
    yield f"conditions on the kind of a job: {len(conditions)}: " + ", ".join(f"{k} {n}" for k, n in by_package.items())
    yield f"conditions on what a kind answers by name: {len(list(kind_conditions(code, _asks_answer)))}"
    counts = code.function_counts()
    yield "public function names that occur most: " + ", ".join(f"{name} {n}" for name, n in counts.most_common(12))
    yield f"functions called look: {counts['look']}"
    yield f"import cycles: {len(code.cycles())}"
    for cycle in code.cycles():
        yield f"  {len(cycle)} modules: {', '.join(cycle)}"
    for title, steps in flows(code.repository).items():
        yield f"{title} passes through {len({step.path for step in steps})} files"
        for step, after in pairwise(steps):
            missing = [each.path for each in (step, after) if each.module not in code.modules]
            if missing or code.connection(step, after) is None:
                yield f"  {step.path} -> {after.path}: {'no such file' if missing else 'not connected'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.report", description=__doc__)
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[2], metavar="DIR", help="another checkout")
    for line in report(Code(parser.parse_args().repo)):
        print(line)


if __name__ == "__main__":
    main()
