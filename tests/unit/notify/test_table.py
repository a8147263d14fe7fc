"""[notify] of flightdeck.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import named_programs
from engine.errors import ConfigError
from tests.unit.config.documents import JOB, load

HEAD = "[[node]]\n" + JOB


def test_without_a_table_nobody_is_told(tmp_path: Path) -> None:
    config = load(tmp_path, HEAD)
    assert (config.notify.active, named_programs(config, launch=True)) == (False, [])


def test_what_it_runs_and_where_it_sends_is_accepted_by_a_person_without_the_addresses_secret(tmp_path: Path) -> None:
    before = load(tmp_path, HEAD).digest
    text = """[notify]
command = ["say", "done"]
webhooks = [{ url = "https://discord.com/api/webhooks/1/s3cret", format = "discord" },
            { url = "env:WHERE", token = "env:WHOM" }]
apprise = ["env:CHAT"]
"""
    config = load(tmp_path, HEAD + text)
    assert named_programs(config, launch=True) == [
        ("the notify command", "say done"),
        ("a notification to", "discord.com"),
        ("a notification to", "env:WHERE with env:WHOM"),
        ("a notification to", "env:CHAT by apprise"),
    ]
    assert named_programs(config, launch=False) == []
    assert config.notify.variables == ("WHERE", "WHOM", "CHAT")
    assert config.digest != before


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ('on = ["ends"]', "notify.on[0]"),
        ('webhooks = [{ url = "ftp://host/" }]', "notify.webhooks[0].url"),
        ('webhooks = [{ url = "https://ana:pw@host/" }]', "notify.webhooks[0].url"),
        ('webhooks = [{ url = "https://[abc/" }]', "notify.webhooks[0].url"),
        ('webhooks = [{ url = "https://host/", token = "tk_secret" }]', "notify.webhooks[0].token"),
        ('apprise = ["tgram://1/2"]', "notify.apprise[0]"),
        ("mail = true", "notify.mail"),
    ],
)
def test_faults_are_named_with_their_place(tmp_path: Path, table: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f"{HEAD}[notify]\n{table}\n")
    assert [one.key for one in refused.value.faults] == [fault]
