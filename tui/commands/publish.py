"""publish: the weights of a run for LM Studio, Ollama or llama.cpp, or on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import sys

from engine.api import Engine, ExitCode, PublicationRequest
from engine.errors import InputError
from tui.commands.terminal import Lines, is_person, print_json


def publish(options: argparse.Namespace, engine: Engine) -> int:
    target = next(name for name in ("lmstudio", "ollama", "gguf", "hub") if getattr(options, name) is not None)
    if options.private and target != "hub":
        raise InputError("--private", why="only a repository on the Hub is private", todo="use it with --hub")
    publication = engine.publishing.publish(
        PublicationRequest(
            run=options.run,
            target=target,
            folder=options.source,
            place=getattr(options, target) or None,
            private=options.private,
            base_model=options.base_model,
            license=options.license,
            progress=is_person(sys.stderr) and not options.json,
        )
    )
    if options.json:
        print_json(publication)
        return ExitCode.OK
    lines = Lines()
    lines.say(f"published {publication.url or publication.folder}")
    if publication.commands:
        lines.say("nothing was run; next:" if target != "lmstudio" else "it is in LM Studio's My Models; or:")
        for command in (f"cd {publication.folder}", *publication.commands):
            lines.say(f"  {command}")
        if any("$LLAMA_CPP" in command for command in publication.commands):
            lines.say(lines.ink("  LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp", "dim"))
    return ExitCode.OK
