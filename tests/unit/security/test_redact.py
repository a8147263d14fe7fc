"""Secrets go by their name, their form and their value; ordinary words stay."""

from __future__ import annotations

import base64
import random
import re
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.security.redact import FORMS, KEY_LINES, REDACTED, KeyLines, Redactor, SecretForm, is_secret, redact

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    "text",
    [
        f"401 for {TOKEN}",
        "HF_TOKEN=s3cr3t-value",
        "export WANDB_API_KEY='s3cr3t-value'",
        '{"HF_TOKEN": "s3cr3t-value"}',
        "password: s3cr3t-value",
        "Authorization: Bearer s3cr3t-value-0123456789",
        "sk-s3cr3t-value-0123456789",
        "s3://key:s3cr3t@bucket/run",
        "postgres://ana:p%40s3cr3t@db.local:5432/x?y=a@b",
        "cloning https://s3cr3t@huggingface.co/ana/model",
        "GET https://store.example/adapters.safetensors?v=2&sig=s3cr3t%2B&e=1",
        "https://store.example/a?X-Amz-Credential=s3cr3t%2F2026&X-Amz-Signature=s3cr3t",
    ],
)
def test_secrets_are_taken_out(text: str) -> None:
    assert REDACTED in redact(text, {})
    assert "s3cr3t" not in redact(text, {})
    assert TOKEN not in redact(text, {})


def test_a_secret_of_the_environment_is_taken_out_wherever_its_value_stands() -> None:
    environment = {"WANDB_API_KEY": "0123abcd", "OTHER_TOKEN": "0123abcdef", "HOME": "/home/ana"}
    text = redact("key 0123abcd, longer 0123abcdef, in /home/ana", environment)
    assert text == f"key {REDACTED}, longer {REDACTED}, in /home/ana"


@pytest.mark.parametrize(
    "text",
    [
        "trained_tokens: 1234567",
        "tokens_per_second=1234.567",
        "the tokenizer.json is missing",
        "git clone ssh://git@example.org/ana/model",
        "http://ana.local:8080/metrics",
        "s3://bucket/run?region=eu",
        "https://example.org/issues/1@2",
        "mail ana@example.org: see https://example.org",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text, {}) == text


def test_a_document_is_redacted_at_every_depth() -> None:
    document = {"env": {"HF_TOKEN": "x", "PATH": "/bin"}, "argv": ["run", f"--token={TOKEN}"], "count": 3, "on": True}
    assert Redactor(environment={}).document(document) == {
        "env": {"HF_TOKEN": REDACTED, "PATH": "/bin"},
        "argv": ["run", f"--token={REDACTED}"],
        "count": 3,
        "on": True,
    }


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "password"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


def test_a_long_line_of_words_and_dots_ends() -> None:
    """A scheme that was sought from each word on would take a quarter of an hour."""
    line = "a." * 500_000
    assert redact(f"{line} https://ana:secret@host/") == f"{line} https://{REDACTED}@host/"


def test_the_count_of_tokens_is_no_secret() -> None:
    assert not is_secret("trained_tokens")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_is_recognised_by_itself_and_nothing_of_it_is_left(form: SecretForm) -> None:
    example = form.example.replace("«", "").replace("»", "")
    secret = re.search("«(.*)»", form.example)
    assert secret is not None
    found = form.expression.search(example)
    assert found is not None and found.end() == form.example.find("»") - 1
    assert any(word in found.group(0).lower() for word in form.needles.split())
    for line in (example, f"INFO: {example}", f"{{'x': '{example}'}}", f"rank 0 | {example} and so on"):
        assert secret.group(1) not in redact(line, {})
    assert redact(redact(example, {}), {}) == redact(example, {})


S = "aB3" * 12
PARTS = f"eyJ{S}.eyJ{S}.{S}"


@pytest.mark.parametrize(
    "line",
    [
        f"OPENAI_KEY={S}",
        f"PGPASS={S}",
        f"PGPASSWORD: {S}",
        f"export AUTH={S}",
        f"REDIS_AUTH='{S}'",
        f"MYSQL_PWD={S}",
        f"DB_PASS = {S}",
        f'{{"api_key": "{S}", "loss": 2.5}}',
        f"{{'hf_token': 'a phrase of words {S}'}}",
        f'"{{\\"HF_TOKEN\\": \\"{S}\\"}}"',
        f"environ({{'WANDB_API_KEY': '{S}'}})",
        f"AccountKey={S};EndpointSuffix=core",
        f"X-Api-Key: {S}",
        f"curl -H 'Authorization: Bearer {S}'",
        f"{{'Authorization': 'Basic {S}=='}}",
        f"Proxy-Authorization: Basic {S}",
        f"authorization: token {S}",
        f"github_pat_{S}",
        f"ghp_{S}",
        f"glpat-{S}",
        f"xoxb-1234-{S}",
        f"xoxp-1234-{S}",
        f"jwt {PARTS}",
        f"hf_{S}",
        f"sk-proj-{S}",
        f"AIza{S[:35]}",
        f"torchrun train.py --token={S} --lr 1e-4",
        f"torchrun train.py --hf_token {S} --lr 1e-4",
        f"python run.py --api-key '{S}'",
        f"python run.py --password {S}",
        f"argv ['run.py', '--token', '{S}', '--lr', '1']",
        f'["run.py", "--token", "{S}"]',
        f"mysql://ana:{S}@db.local/x",
        f"git clone https://{S}@github.com/a/b",
        f"\x41 wandb: WANDB_API_KEY={S}",
    ],
)
def test_secrets_as_programs_print_them_are_taken_out(line: str) -> None:
    assert S not in redact(line, {})


def test_temporary_keys_of_aws_and_short_words_of_an_option_are_taken_out() -> None:
    assert redact("using ASIAIOSFODNN7EXAMPLE now", {}) == f"using {REDACTED} now"
    assert redact("run.py --token abc --lr 1", {}) == f"run.py --token {REDACTED} --lr 1"
    assert redact("run.py --password='a b c' --lr 1", {}) == f"run.py --password='{REDACTED}' --lr 1"


HEX = st.text("0123456789abcdef", min_size=7, max_size=64)
NUMBER = st.floats(0, 1e6).map(lambda value: f"{value:.4f}") | st.integers(0, 10**9).map(str)
PATH = st.lists(
    st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=12), min_size=1, max_size=6
).map(lambda parts: "/" + "/".join(parts))
WORDS = st.sampled_from(
    ["iteration", "step", "loss", "train_loss", "lr", "grad_norm", "tokens_per_second", "trained_tokens", "tokens",
     "token_count", "max_tokens", "vocab_size", "eos_token_id", "sort_key", "cache_key", "pass", "authored", "keys"]
)  # fmt: skip


@given(st.lists(st.tuples(WORDS, st.sampled_from(["=", ": ", " ", "': ", '": ']), NUMBER | HEX | PATH), max_size=6))
def test_ordinary_log_lines_stay_as_they_are(parts: list[tuple[str, str, str]]) -> None:
    line = ", ".join(map("".join, parts))
    assert redact(line, {}) == line


@given(HEX, PATH, st.uuids(), st.integers(0, 10**6))
def test_hashes_commits_ids_and_paths_stay(digest: str, path: str, identifier: uuid.UUID, step: int) -> None:
    for line in (
        f"saved {path}/checkpoint-{step}/model.safetensors (sha256 {digest})",
        f"commit {digest}",
        f"run {identifier} began",
        f"git clone git@github.com:ana/model.git at {digest}",
        f'[rank0]:   File "{path}/train.py", line {step}, in <module>',
    ):
        assert redact(line, {}) == line


@pytest.mark.parametrize(
    "line",
    [
        "eos_token='<|im_end|>', pad_token=<|endoftext|>, bos_token: [BOS_OF_TEXT]",
        "token: 128009 (prob 0.25)",
        "tokens: 4096, token ids [1, 2, 3]",
        "HF_TOKEN is not set; token: missing; password: required",
        "usage: train.py [--token] [--api-key] --verbose",
        "train.py --token --verbose",
        "trained with AdamW, basic training, bearer of news",
        "disk-0123456789abcdef0123 task-0123456789abcdef0123",
        "eyJ is how a token begins",
        "sg. loss 2.5 xox hf_hub gl-global-step-00000000000000000001",
        "first pass: completed 12 of 20; author: somebody; keyboard=german-layout",
        "-----BEGIN CERTIFICATE-----",
        "loading the PRIVATE KEY from /home/ana/.ssh/id_rsa",
        "iteration 10: train loss 2.345, val loss 2.456, lr 1.000e-04, 12.3 it/s, 1234.5 tok/s, peak 3.21 GB",
        " 42%|████▏     | 42/100 [00:12<00:17,  3.32it/s, loss=2.34, token_acc=0.712345]",
    ],
)
def test_lines_that_look_like_secrets_and_are_none_stay(line: str) -> None:
    assert redact(line, {}) == line


def key_of(label: str, size: int = 1200) -> list[str]:
    body = base64.b64encode(random.Random(1).randbytes(size)).decode()
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return [f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"]


@pytest.mark.parametrize(
    "label", ["RSA PRIVATE KEY", "PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK"]
)
@pytest.mark.parametrize("before", ["", "[rank0]: ", "  "])
def test_a_private_key_is_taken_out_line_by_line(label: str, before: str) -> None:
    key = [before + line for line in key_of(label)]
    text = "\n".join(["loss 2.5", *key, "loss 2.4 saved /home/ana/checkpoints/0000100"])
    shown = redact(text, {}).split("\n")
    assert (shown[0], shown[-1]) == ("loss 2.5", "loss 2.4 saved /home/ana/checkpoints/0000100")
    assert all(line.removeprefix(before) == REDACTED for line in shown[1:-1])
    for cut in (1, 5, len(key) - 1):
        assert not any(line[len(before) : len(before) + 20] in redact("\n".join(key[cut:]), {}) for line in key[cut:-1])
    assert key[3] not in redact("\\n".join(key), {}), "all in one line, escaped"


def test_a_key_without_an_end_hides_no_log() -> None:
    lines = KeyLines()
    shown = [lines(line) for line in ["-----BEGIN PRIVATE KEY-----", "QUJD" * 16, "loss 2.5", "QUJD" * 16]]
    assert shown == [REDACTED, REDACTED, "loss 2.5", REDACTED]
    for _ in range(KEY_LINES):
        assert lines("Saved the model, loss 2.5.") == "Saved the model, loss 2.5."
    assert lines("QUJD" * 16) == "QUJD" * 16


OWN = {"SETTING": "correct horse", "A": "1", "B": "true", "C": "cpu", "D": "offline", "E": "0,1,2,3,4,5",
       "F": "/home/ana/src:/data", "G": "hunter2", "MLX_RING": "settings-of-mlx", "H": "line 1 is long\nline two, too",
       "I": 'with "quotes" in it', "MY_TOKEN": "123456"}  # fmt: skip


def test_values_of_the_jobs_environment_are_taken_out_but_what_logs_are_full_of() -> None:
    redactor = Redactor(OWN, {})
    for secret in (
        "correct horse",
        "hunter2",
        "line 1 is long",
        "line two, too",
        'with \\"quotes\\" in it',
        "123456",
    ):
        assert redactor(f"it is {secret}.") == f"it is {REDACTED}."
    ordinary = "1 true cpu offline 0,1,2,3,4,5 /home/ana/src/train.py settings-of-mlx hunter200 1234567"
    assert redactor(ordinary) == ordinary
    assert redactor("a correct horses") == f"a {REDACTED}s", "a long one is found within a word, too"


def test_the_words_of_a_command_are_shown_without_credentials() -> None:
    words = [
        "torchrun",
        "train.py",
        "--token",
        "abc",
        "--password",
        "--lr",
        "1e-4",
        "--api-key=xyz",
        "HF_TOKEN=abcdefg",
        "--password",
        "of two words",
        "--secret=of two words",
    ]
    shown = ["torchrun", "train.py", "--token", REDACTED, "--password", "--lr", "1e-4"]
    shown += [f"--api-key={REDACTED}", f"HF_TOKEN={REDACTED}", "--password", REDACTED, f"--secret={REDACTED}"]
    assert Redactor({}, {}).words(words) == shown
    assert Redactor({}, {}).document({"argv": words}) == {"argv": shown}


@pytest.mark.parametrize(
    "piece", ["a", "-", "--a-", "token", "key=", "eyJ.", "https://", "A_KEY", "AUTH ", "secret: '"]
)
def test_no_line_takes_long(piece: str) -> None:
    """Each pattern is linear: 64 KB, the most that is shown of a line, of what begins to match."""
    redact(piece * (65_536 // len(piece)), {})
