"""What a set-up keeps, finds and writes."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest

from engine.api import Engine, FoundHost, FoundPython, NodeCandidate, SetupChoices
from engine.errors import ConfigError
from engine.plan.capacity import Capacity, CapacityReport

ULTRA = NodeCandidate(FoundHost("ultra", "ana@ultra.local", ("given",)), FoundPython("~/p/bin/python", mac=True))
CHOICES = SetupChoices(step=2, typed=("ana@ultra.local",), chosen=("ana@ultra.local",), model="~/m", data="~/d")


@pytest.fixture
def engine(home: Path) -> Engine:
    return Engine(home)


def test_choices_are_kept_until_the_file_is_written(engine: Engine, tmp_path: Path) -> None:
    target, other = tmp_path / "flightdeck.toml", tmp_path / "other.toml"
    assert engine.setup.read(target) == SetupChoices()
    engine.setup.keep(target, CHOICES)
    assert (engine.setup.read(target), engine.setup.read(other)) == (CHOICES, SetupChoices())
    config = engine.setup.write(target, engine.setup.text(target, CHOICES, [ULTRA]))
    assert (config.file, config.nodes[0].ssh) == (target, "ana@ultra.local")
    assert engine.nodes.is_accepted(engine.load_config(target)), "what was chosen here may run"
    read = engine.setup.read(target)
    assert (read.step, read.chosen, read.model, read.iters) == (0, ("ana@ultra.local",), "~/m", 1000), "by the file"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["flightdeck.toml"]


def test_a_yaml_fills_in_and_a_command_has_its_own(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "flightdeck.toml"
    (tmp_path / "lora.yaml").write_text("model: ~/m\ndata: ~/d\niters: 7\n")
    read = engine.setup.read(target)
    assert (read.model, read.data, read.iters, read.own_program) == ("~/m", "~/d", 7, False)
    target.write_text('[[node]]\nssh = "ana@ultra.local"\npython = "~/p"\n[job]\ncommand = ["true"]\n')
    read = engine.setup.read(target)
    assert read.own_program and read.settings == {}
    engine.setup.write(target, engine.setup.text(target, read, [ULTRA]))


def test_a_batch_in_tokens_epochs_and_processes_of_the_file_stay(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "flightdeck.toml"
    node = '[[node]]\nssh = "ana@ultra.local"\npython = "~/p/bin/python"\nprocesses = 4\n'
    target.write_text(f'{node}[job]\nmodel = "~/m"\ndata = "~/d"\nbatch_tokens = 9000\nepochs = 2\n')
    read = engine.setup.read(target)
    assert (read.batch_size, read.batch_tokens, read.iters, read.epochs) == (None, 9000, None, 2)
    assert read.ranks(["ana@ultra.local", "bea@max.local"]) == 5
    config = engine.setup.config(target, engine.setup.text(target, read, [ULTRA]))
    assert len(config.nodes) == 4
    assert {"batch_tokens": 9000, "epochs": 2}.items() <= config.job.mlx_lm.items()
    other = read.model_copy(update={"batch_size": 8, "batch_tokens": None, "iters": 50, "epochs": None})
    job = tomllib.loads(engine.setup.text(target, other, [ULTRA]))["job"]
    assert job == {"model": "~/m", "data": "~/d", "batch_size": 8, "iters": 50}


def test_a_name_that_is_longer_than_a_path_is_no_file_beside_it(engine: Engine, tmp_path: Path) -> None:
    choices = CHOICES.model_copy(update={"data": "d" * 5000})
    assert "push" not in engine.setup.text(tmp_path / "flightdeck.toml", choices, [ULTRA])


@pytest.mark.parametrize("kept", [b"", b"{", b'{"batch_size": 0}', b'{"step": "x"}', b"\xff"])
def test_damage_to_what_was_kept_is_as_if_there_were_none(engine: Engine, tmp_path: Path, kept: bytes) -> None:
    target = tmp_path / "flightdeck.toml"
    engine.setup.keep(target, CHOICES)
    next(engine.home.glob("setup-*.json")).write_bytes(kept)
    assert engine.setup.read(target) == SetupChoices()


def test_a_file_with_faults_is_not_written_and_its_own_name_is_in_them(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "flightdeck.toml"
    target.write_text('[[node]]\nssh = "ana@ultra.local"\npython = "~/p"\n[job]\nmodel = "~/m"\ndata = "~/d"\n')
    before = target.read_text()
    target.chmod(0o600)
    changed = engine.setup.text(target, SetupChoices(model="~bob/m"), [ULTRA])
    with pytest.raises(ConfigError, match=rf"{target}: job.model"):
        engine.setup.write(target, changed)
    assert target.read_text() == before
    engine.setup.write(target, engine.setup.text(target, SetupChoices(iters=7), [ULTRA]))
    assert tomllib.loads(target.read_text())["job"] == {"model": "~/m", "data": "~/d", "iters": 7}
    assert target.stat().st_mode & 0o777 == 0o600


def test_hosts_come_when_they_are_found_and_again_with_their_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def discover(*, bonjour: bool) -> list[FoundHost]:
        return [FoundHost("head", "127.0.0.1", ("this machine",)), *[FoundHost("max", "max", ("Bonjour",))] * bonjour]

    async def ask(host: str) -> FoundPython:
        return FoundPython(hostname=host)

    monkeypatch.setattr(engine.nodes, "discover", discover)
    monkeypatch.setattr(engine.setup, "ask", ask)

    async def collect(typed: tuple[str, ...], *, others: bool) -> list[NodeCandidate]:
        return [candidate async for candidate in engine.setup.candidates(typed, others=others)]

    everyone = asyncio.run(collect(("max",), others=True))
    assert {one.host.ssh: one.host.sources for one in everyone} == {"max": ("given",), "127.0.0.1": ("this machine",)}
    assert [one.host.ssh for one in everyone if one.answer].count("max") == 1
    assert [one.host.ssh for one in asyncio.run(collect(("max",), others=False))] == ["max", "max"]


def test_the_least_room_counts_and_other_models_do_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(method: str, amount: int | None) -> Capacity:
        return Capacity(("a",), method, "x", amount)

    rows: list[Capacity] = []

    async def capacities(*_: object, **__: object) -> CapacityReport:
        return CapacityReport("", None, 2048, None, rows)

    monkeypatch.setattr(engine.launches, "capacities", capacities)

    def fits() -> dict[str, int | None]:
        found = asyncio.run(engine.setup.capacities(None))  # type: ignore[arg-type]
        return {method: one.amount for method, one in found.items()}

    rows[:] = [row("lora", 8), row("full", 0), row("qlora", 20), row("lora", 3), row("full", 1)]
    assert fits() == {"lora": 3, "full": 0, "qlora": 20}
    rows[:] = [row("qlora", 20), row("full", None)]
    assert fits() == {"lora": 20, "full": None}


def test_data_beside_the_file_is_sent_to_other_machines(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "flightdeck.toml"
    for name in (
        "chats/train.jsonl",
        "rows.csv",
        "notes.pdf",
        "README.md",
        "a.arrow",
        "b.feather",
        "c.ndjson",
        "d.jsonl.gz",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert engine.setup.data_found(target) == ["chats", "a.arrow", "b.feather", "c.ndjson", "d.jsonl.gz", "rows.csv"]
    here = NodeCandidate(FoundHost("head", "127.0.0.1", ("this machine",)), FoundPython("/p/bin/python"))
    for data, node, push in (("chats", ULTRA, True), ("chats", here, False), ("~/d", ULTRA, False)):
        choices = SetupChoices(model="~/m", data=data)
        config = engine.setup.config(target, engine.setup.text(target, choices, [node]))
        assert (config.job.data, config.data.push) == (data, push)
    engine.setup.write(target, engine.setup.text(target, SetupChoices(model="~/m", data="~/d"), [ULTRA]))
    assert engine.setup.config(target, engine.setup.text(target, SetupChoices(data="rows.csv"), [ULTRA])).data.push


def test_the_subset_of_a_data_set_is_named_behind_it(engine: Engine, tmp_path: Path) -> None:
    target, choices = tmp_path / "flightdeck.toml", SetupChoices(model="org/m", data="hf:openai/gsm8k main")
    target.write_text(engine.setup.text(target, choices, [ULTRA]))
    assert engine.setup.read(target).data == choices.data
    for data, subset in ((choices.data, "main"), ("hf:openai/gsm8k socratic", "socratic")):
        config = engine.setup.config(target, engine.setup.text(target, SetupChoices(data=data), [ULTRA]))
        assert (config.job.data, config.data.subset) == ("hf:openai/gsm8k", subset)


def test_a_login_key_is_put_there_in_the_terminal(engine: Engine) -> None:
    argv = engine.setup.copy_id_argv("ana@ultra.local:2222")
    assert argv[-3:] == ["-p", "2222", "ana@ultra.local"] and "StrictHostKeyChecking=yes" in argv
    assert f'UserKnownHostsFile="{engine.home}/known_hosts" ~/.ssh/known_hosts' in argv
