"""The scripts of `flightdeck completion`, as each shell runs them, without a flightdeck that could be asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tui.commands import environment, flightdeck
from tests.unit.run.run_maker import MadeRun

BASH = """source {script}
COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_flightdeck; echo "${{COMPREPLY[@]}}"
"""
FISH = "source {script}; complete -C '{line}'"
ZSH = """zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath+={folder}; autoload -U compinit; compinit -D -u; echo re''ady"
zpty -r -m shell line '*ready*'
zpty -w -n shell $'{line}\\t'
zpty -r -m shell line '*{expected}*' && print -r -- "$line"
"""
"""At a terminal of its own, which echoes the completed word."""


@pytest.mark.parametrize(
    ("shell", "form"),
    [
        pytest.param("bash", BASH),
        pytest.param("fish", FISH, marks=pytest.mark.needs("fish")),
        pytest.param("zsh", ZSH, marks=[pytest.mark.needs("zsh"), pytest.mark.slow]),
    ],
    ids=["bash", "fish", "zsh"],
)
def test_a_shell_completes_commands_options_choices_files_and_runs(
    tmp_path: Path, home: Path, shell: str, form: str
) -> None:
    run = MadeRun(home, name="demo").state("preflight", "failed", reason="preflight_failed").close()
    script = tmp_path / "_flightdeck"
    script.write_text(flightdeck(home, "completion", shell).out)
    (tmp_path / "cluster.toml").touch()
    for line, expected in (
        ("flightdeck lau", "launch"),
        ("flightdeck launch --stra", "--strategy"),
        ("flightdeck launch --strategy sha", "sharded"),
        ("flightdeck launch -c clu", "cluster.toml"),
        ("flightdeck help comp", "completion"),
        (f"flightdeck show {run.id[:-4]}", run.id),
    ):
        text = form.format(script=script, folder=tmp_path, line=line, expected=expected)
        env = environment(home, PATH="/usr/bin:/bin")
        done = subprocess.run(
            [shell, "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )
        assert expected in done.stdout, (line, done)
