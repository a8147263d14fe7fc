"""Writes the generated parts of the documentation: `uv run python -m tests.docs.generate`.

A generated part of a document lies between `<!-- generated: NAME -->` and `<!-- /generated -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from engine.checks.runner import CHECKS
from engine.failures.explanation import findings
from engine.failures.signature import Signature, SignatureKind
from engine.failures.signatures import SIGNATURES
from tests.docs import exchange, schema
from tests.docs.configuration import configuration
from tests.gpu import mlx_parts, torch_parts
from tui import actions, cli

ROOT: Final = Path(__file__).resolve().parents[2]
_PART: Final = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_ISSUE: Final = re.compile(r"\b(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")
_PRINTED_BY: Final = {
    "launch": "mlx.launch and the shell that starts a rank",
    "config": "mlx.distributed_config",
    "ring": "MLX's ring backend",
    "any": "Any backend of MLX",
    "dist": "Any backend of MLX",
    "jaccl": "MLX's jaccl backend (RDMA over Thunderbolt)",
    "metal": "Metal",
    "os": "macOS",
    "lora": "mlx-lm",
    "hf": "The Hugging Face libraries",
    "import": "Python's imports",
    "memory": "Memory",
    "disk": "Disks",
    "ssh": "ssh",
    "c10d": "torch.distributed",
    "gloo": "torch's gloo backend",
    "nccl": "The nccl backends of torch and MLX",
    "cuda": "CUDA and its driver",
    "torch": "torch",
    "ddp": "DistributedDataParallel and fully_shard",
    "fsdp": "DistributedDataParallel and fully_shard",
    "elastic": "torchrun (torchelastic)",
    "deepspeed": "DeepSpeed",
    "transformers": "transformers and peft",
    "peft": "transformers and peft",
}
"""The first part of a signature's id → the heading that it stands under."""


def commands() -> str:
    """Every command with its options and examples, from the argument parser."""
    return "\n\n".join(_command(name, parser) for name, parser in _subparsers(cli.command_parser()).items())


def _subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    choices: Mapping[str, argparse.ArgumentParser] = found.choices
    return choices


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [f"| {_written(action)} | {action.help} |" for action in parser._actions if _is_shown(action)]
    examples = [re.split(r" {3,}", line.strip(), maxsplit=1) for line in (parser.epilog or "").splitlines()[1:]]
    width = max(len(example[0]) for example in examples)
    return "\n".join(
        [
            f"## flightdeck {name}",
            "",
            str(parser.description),
            "",
            *(["| option | meaning |", "|---|---|", *rows, ""] if rows else []),
            *("    " + "   # ".join([example[0].ljust(width), *example[1:]]).rstrip() for example in examples),
        ]
    )


def _is_shown(action: argparse.Action) -> bool:
    """--help and --json are the same everywhere; the page says so once."""
    return not {"--help", "--json"} & set(action.option_strings)


def _written(action: argparse.Action) -> str:
    value: Any = action.metavar or ("|".join(action.choices) if action.choices else None)
    names = [f"`{name}{f' {value}' if value else ''}`" for name in action.option_strings] or [f"`{value}`"]
    return ", ".join(names).replace("|", "\\|")


def checks() -> str:
    """Every preflight check."""
    rows = [f"| `{check.name}` | {check.label} | {check.title} |" for check in CHECKS.values()]
    return "\n".join(["| check | in the console | what it verifies |", "|---|---|---|", *rows])


def signatures() -> str:
    """Every known failure message, by the program that prints it."""
    headings = list(dict.fromkeys(_PRINTED_BY.values()))
    return "\n\n".join(
        "\n\n".join([f"## {heading}", *(_signature(each) for each in SIGNATURES if _heading(each) == heading)])
        for heading in headings
    )


def _heading(signature: Signature) -> str:
    return _PRINTED_BY[signature.id.partition(".")[0]]


def _signature(signature: Signature) -> str:
    (found,) = findings([signature.example])
    kinds = {
        SignatureKind.CONSEQUENCE: " Something else failed first: this is a consequence.",
        SignatureKind.NOISE: " Not a cause: healthy runs print it too, or another log explains it.",
    }
    source = _ISSUE.sub(r"[\g<0>](https://github.com/\g<repository>/issues/\g<number>)", signature.source.text)
    return "\n".join(
        [
            f"### {signature.id}",
            "",
            f"    {signature.example}",
            "",
            f"- Cause: {found.cause}.{kinds.get(signature.kind, '')}",
            f"- Fix: {found.fix}.",
            f"- Source: {source} ({signature.source.proof}).",
        ]
    )


def gpu_parts() -> str:
    """Every part of a visit to a GPU machine, in its order."""
    parts = (*torch_parts.PARTS, *mlx_parts.PARTS)
    rows = [f"| `{part.name}` | {part.what} | {part.limit_s:.0f} s |" for part in parts]
    return "\n".join(["| part | what it shows | at most |", "|---|---|---|", *rows])


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "averaging": exchange.averaging_table,
    "checks": checks,
    "commands": commands,
    "configuration": configuration,
    "exchange": exchange.table,
    "gpu_parts": gpu_parts,
    "keys": actions.markdown,
    "signatures": signatures,
}


def generated(document: str) -> str:
    """The document with its generated parts made anew. Raises KeyError for a part of no known name."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n\n{part[3]}", document)


def main() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    schema.write()


if __name__ == "__main__":
    main()
