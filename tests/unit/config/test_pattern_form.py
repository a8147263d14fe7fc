"""A job's own pattern for its metrics: what it needs, and what could hold up a rank's log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.formats import pattern_form
from engine.config.load import load_config
from engine.errors import ConfigError
from engine.protocol.metric_patterns import FORMS

READ = r" (?P<step>[0-9]+) (?P<loss>[0-9.]+)"


@pytest.mark.parametrize(
    "pattern",
    [
        "step (?P<step>[0-9]+) .* loss (?P<loss>[0-9.]+)",
        r"epoch (?P<epoch>\d+)/(?P<epochs>\d+).*step (?P<step>\d+).*loss (?P<loss>\S+)",
        r"(?i)\s*(?P<step>\d+)\s*\|\s*(?P<train_loss>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*\|.*$",
        r"iter (?P<iter>\d+): loss (?P<loss>[\d.]+)|eval (?P<step>\d+): (?P<val_loss>[\d.]+)",
        r"[^,]*,[^,]*,[^,]*,(?P<step>\d+),(?P<loss>[^,]+)",
        r"^(?:(?:train|fit) )?(?P<step>\d{1,9}): (?P<loss>\S+)",
    ],
)
def test_patterns_as_people_write_them_are_accepted(pattern: str) -> None:
    assert pattern_form(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$" + READ,
        r"(?:\w+\s?)*loss" + READ,
        "(?:a|aa)+" + READ,
        "(?:ab|ab)*x" + READ,
        "(.*?,){11}P" + READ,
        "(?:.*)*" + READ,
        ".*.*.*x" + READ,
        r"\s*\s*\s*\s*x" + READ,
        r"\d+" * 9 + "x" + READ,
        "a?" * 20 + "a" * 20 + READ,
        "(?:(?:ab|ab)c)" * 18 + READ,
        "(?P<x>a)(?P=x)" + READ,
        "(?>a)" + READ,
        "a++" + READ,
    ],
)
def test_a_pattern_that_could_try_a_line_for_minutes_is_refused(pattern: str) -> None:
    assert "few ways" in str(pattern_form(pattern))


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(?P<step>", "missing )"),
        (r"loss (?P<loss>\S+)", "step and loss"),
        (r"step (?P<step>\d+)", "step and loss"),
        (r"(\d+) (\S+)", "step and loss"),
        ("x" * 1001, "1000"),
        (5, "1000"),
    ],
)
def test_what_a_pattern_lacks_is_said(pattern: object, fault: str) -> None:
    assert fault in str(pattern_form(pattern))


@given(st.text(max_size=60))
def test_any_text_is_judged(text: str) -> None:
    assert pattern_form(text) is None or isinstance(pattern_form(text), str)


def test_the_known_forms_are_bounded_too() -> None:
    assert [form.regex.pattern for form in FORMS if "few ways" in str(pattern_form(form.regex.pattern))] == []


JOB = "[[node]]\nname = 'a'\n[job]\n{job}\nmetrics = {pattern}\n"


@pytest.mark.parametrize("job", ["command = ['python', 't.py']", "framework = 'torch'\nscript = 't.py'"])
def test_it_is_of_a_command_of_either_framework(tmp_path: Path, job: str) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_text(JOB.format(job=job, pattern=f"'''{READ}'''"))
    assert load_config(file).job.metrics == READ
    file.write_text(JOB.format(job=job, pattern="'(a+)+'"))
    with pytest.raises(ConfigError, match=r"job\.metrics"):
        load_config(file)


def test_the_trainers_and_what_has_a_tracker_need_none(tmp_path: Path) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_text(JOB.format(job="model = '/m'\ndata = '/d'", pattern=f"'''{READ}'''"))
    with pytest.raises(ConfigError, match="no value here: it is for a command"):
        load_config(file)
    file.write_text(
        JOB.format(job="framework = 'torch'\nscript = 't.py'\nlogging_dir = 'logs'", pattern=f"'''{READ}'''")
    )
    with pytest.raises(ConfigError, match="logging_dir in place"):
        load_config(file)
