"""Secrets go by their name, their form and their value; ordinary words stay."""

from __future__ import annotations

import pytest

from engine.security.redact import REDACTED, is_secret, redact, redact_document

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
    assert redact_document(document, {}) == {
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
