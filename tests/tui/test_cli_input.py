"""Arguments that are no path, run or check are refused clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.errors import ConfigError
from tests.tui.commands import flightdeck
from tui.cli import command_parser

HOSTILE = "a\x1b[31mb\nforged: yes"
JOB = '[[node]]\nname = "a"\n\n[job]\ncommand = ["true"]\n'


@pytest.mark.parametrize(
    "arguments",
    [
        ("preflight", "-c", HOSTILE),
        ("preflight", "-c", "a" * 5000),
        ("-c", HOSTILE, "nodes"),
        ("init", "127.0.0.1", "-o", HOSTILE),
        ("init", "--hostfile", HOSTILE),
        ("preflight", "--skip", HOSTILE),
        ("preflight", "--skip", "../" * 2000),
        ("show", HOSTILE),
        ("abort", "../../../etc"),
        ("logs", "9" * 5000),
        ("metrics", "a\u202eb"),
    ],
    ids=lambda arguments: f"{arguments[0]}-{arguments[1][:10]!r}",
)
def test_it_is_refused_in_short_printable_lines_and_nothing_is_written(
    tmp_path: Path, home: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "flightdeck.toml").write_text(JOB)
    done = flightdeck(home, *arguments, cwd=tmp_path)
    assert done.code == 2, done
    lines = done.err.splitlines()
    assert lines and all(line.isprintable() and len(line) < 600 for line in lines), lines
    assert not any(line.startswith("forged") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir() if path != home) == ["flightdeck.toml"]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("[[node]]", "workdir"),
        ("[[node]]", "python"),
        ("[[node]]", "model"),
        ("[[node]]", "data"),
        ("[job]", "model"),
        ("[job]", "data"),
        ("[job]", "config"),
        ("[job]", "adapter_path"),
        ("[job]", "resume_adapter_file"),
        ("[job]", "data_quality_report"),
        ("[preflight]", "sync_script"),
        ("[cluster]", "hostfile"),
    ],
)
@pytest.mark.parametrize("path", ["a/../../etc/passwd", "~/../x", "$(id)", "-x"])
def test_every_path_of_a_configuration_is_refused_when_it_is_none(
    tmp_path: Path, table: str, key: str, path: str
) -> None:

    tables = {"[[node]]": ['name = "a"'], "[job]": [], "[preflight]": [], "[cluster]": []}
    tables["[job]"] += [f'{name} = "x"' for name in ("model", "data") if (table, key) != ("[job]", name)]
    tables[table].append(f'{key} = "{path}"')
    file = tmp_path / "flightdeck.toml"
    file.write_text("\n".join(f"{name}\n" + "\n".join(lines) for name, lines in tables.items()))
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert any(fault.key.endswith(key) and "a p" in fault.accepted for fault in refused.value.faults), refused.value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28_800.0), ("90m", 5400.0), ("1h 30min", 5400.0), ("2d", 172_800.0), ("0.5h", 1800.0)]
    + [(text, None) for text in ("8", "h", "0h", "8h later", "-1h", "8 weeks", "")],
)
def test_a_time_to_run_for_has_a_unit(text: str, seconds: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    if seconds is not None:
        assert command_parser().parse_args(["launch", "--for", text]).for_s == seconds
        return
    with pytest.raises(SystemExit):
        command_parser().parse_args(["launch", f"--for={text}"])
    assert "expected a time such as 30m, 8h or 2d" in capsys.readouterr().err
