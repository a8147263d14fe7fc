"""Redacts secrets from everything shown, journalled or exported: by name, by form (FORMS), and by value. Values come
from the environment, of the variables that have a secret's name, and from [job] env, all of whose values count as
secrets but for those that logs are full of."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

REDACTED = "[redacted]"
_NAMES = (
    r"TOKEN(?!\W{1,4}\d{1,8}(?![\w.-]))|(?:API|ACCESS|ACCOUNT|PRIVATE|SIGNING|ENCRYPTION|OPENAI|SECRET)[_-]?KEY|SECRET"
    r"|PASSWORD|PASSWD|PASSPHRASE|PGPASS|CREDENTIALS?"
)
"""Endings of the names of secrets, in capitals or not. A token with a number is one of a text."""
_VARIABLES = r"_KEY|PASS|AUTH|_PWD|_CREDS?|_COOKIE"
"""Endings of variables that hold secrets, in capitals alone: `sort_key` and `pass` are ordinary words."""
_SECRET_NAME = re.compile(rf"(?i:{_NAMES}|^AWS_ACCESS_KEY_ID)$|(?:^|[A-Z0-9_])(?:{_VARIABLES})$")
_TOKENIZERS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "per", "next", "end", "start")
_OF_TEXT = "".join(rf"(?<!(?i:{kind}[_-]token))" for kind in _TOKENIZERS)
"""Not the end of a name: those are a tokenizer's."""
_ORDINARY = r"(?!(?i:true|false|none|null|auto|yes|no|not|is|missing|invalid|expired|required)\b|<|--)"
"""Ahead of a value: what is said about a secret, or a tokenizer's."""
_QUOTED = r"(?<=\")[^\"\n]{4,}|(?<=')[^'\n]{4,}"
_PART = r"[A-Za-z0-9_-]"
_SCHEMES = "(?i:Bearer|Basic|Token|Digest|Negotiate)"


@dataclass(frozen=True, eq=False)
class SecretForm:
    """A recognisable form of secrets. The whole match is taken out, apart from a group `before`."""

    name: str
    pattern: str
    example: str
    """With the secret's part between « and »."""
    needles: str
    """Words of which one is in the lower case of whatever matches: most lines are passed over by that."""
    after: str = ""
    """A pattern of what follows the word: most lines have words such as `tokens`."""

    @cached_property
    def expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


# fmt: off
FORMS = (
    # A password after any scheme; after http also a token alone, which ssh://git@host is not.
    SecretForm("credentials in a URL",
        r"(?P<before>\bhttps?://(?=[^\s/?#\"'<>]+@)|(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,31}://"
        r"(?=[^\s/?#\"'<>:@]*:[^\s/?#\"'<>]+@))[^\s/?#\"'<>]+(?=@)",
        "postgres://«ana:p%40s»@db.local/x", "://"),
    # Signed URLs (X-Amz-Signature, Azure's sig) and keys.
    SecretForm("parameter of a URL",
        rf"(?P<before>[?&](?:{_PART}{{0,40}}-)?(?i:sig|signature|credential|key|password|secret|token)=)[^\s&#\"'<>]+",
        "https://store.example/a?X-Amz-Signature=«0a1b2c»",
        "sig= signature= credential= key= password= secret= token="),
    SecretForm("Slack's webhook", r"(?P<before>hooks\.slack\.com/services/)[\w/]{16,}",
        "https://hooks.slack.com/services/«T00000000/B00000000/abcdefgh»", "hooks.slack.com"),
    SecretForm("authorization header",
        rf"(?P<before>\b(?i:Authorization)\\?[\"']?\s*[:=]\s*\\?[\"']?(?:{_SCHEMES}\s+)?)(?!{_SCHEMES}\b)[^\s\"'\\]{{4,}}",
        "Authorization: Basic «dXNlcjpwYXNz»", "authorization"),
    SecretForm("bearer token", r"(?P<before>\b(?i:Bearer)\s+)[A-Za-z0-9._~+/-]{16,}=*",
        "it sent Bearer «0123456789abcdefgh»", "bearer"),
    SecretForm("option of a command",
        rf"(?P<before>(?<![\w-])--?(?:{_PART}{{0,40}}[_-])?(?i:{_NAMES}|auth){_OF_TEXT}(?:=|[\"']?,?\s+)[\"']?){_ORDINARY}(?!-)"
        rf"(?:{_QUOTED}|[^\s\"']{{2,}})",
        "train.py --api-key «abc123»",
        "token key secret password passwd passphrase pgpass credential credentials auth", r"[\"']?,?[=\s]"),
    SecretForm("value under a secret's name",
        rf"(?P<before>(?:(?i:{_NAMES}){_OF_TEXT}|(?<![a-z])(?:{_VARIABLES}))\\?[\"']?\s*[=:]\s*\\?[\"']?)"
        rf"{_ORDINARY}(?:{_QUOTED}|[^\s\"',;}}&]{{6,}})",
        "export PGPASSWORD='«hunter2»'",
        "token key secret password passwd passphrase pass credential credentials auth _pwd _cred _creds _cookie",
        r"\\?[\"']?\s*[=:]"),
    SecretForm("Hugging Face", r"\bhf_[A-Za-z0-9]{16,}\b", "«hf_AbCdEfGhIjKlMnOpQr»", "hf_"),
    SecretForm("OpenAI, Anthropic", rf"\bsk-{_PART}{{16,}}", "«sk-ant-api03-AbCdEfGhIj»", "sk-"),
    SecretForm("Stripe", r"\b[srp]k_(?:live|test)_[A-Za-z0-9]{10,}", "«sk_live_0123456789ab»", "k_live_ k_test_"),
    SecretForm("GitHub", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
        "«github_pat_11ABCDEFG0_abcdefghijkl»", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_"),
    SecretForm("GitLab", rf"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent)-{_PART}{{16,}}",
        "«glpat-AbCdEfGhIjKlMnOpQrSt»", "glpat- gldt- glrt- glcbt- glptt- glft- glsoat- glimt- glagent-"),
    SecretForm("AWS", r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b", "«ASIAABCDEFGHIJKLMNOP»", "akia asia abia acca"),
    SecretForm("Slack", rf"\b(?:xox[a-z]|xapp)-{_PART}{{10,}}", "«xoxb-0123456789-AbCdEf»", "xox xapp-"),
    SecretForm("JSON web token", rf"\beyJ{_PART}{{8,}}(?:\.{_PART}*){{2,4}}",
        "«eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2lnbmF0dXJl»", "eyj"),
    SecretForm("Google", rf"\b(?:AIza{_PART}{{35}}|ya29\.{_PART}{{20,}})",
        "«AIzaSyA0123456789abcdefghijklmnopqrstuv»", "aiza ya29."),
    SecretForm("SendGrid", rf"\bSG\.{_PART}{{16,}}\.{_PART}{{16,}}", "«SG.abcdefghijklmnop.abcdefghijklmnop»", "sg."),
    SecretForm("other services",
        rf"\b(?:npm_[A-Za-z0-9]{{30,}}|pypi-AgEI{_PART}{{30,}}|(?:gsk_|r8_|dapi|do[op]_v1_)[A-Za-z0-9]{{28,}}"
        rf"|nvapi-{_PART}{{20,}}|hvs\.{_PART}{{20,}}|wandb_v1_{_PART}{{20,}}|AGE-SECRET-KEY-1[0-9A-Z]{{40,}})",
        "«nvapi-AbCdEfGhIjKlMnOpQrStUv»",
        "npm_ pypi- gsk_ r8_ dapi dop_v1_ doo_v1_ nvapi- hvs. wandb_v1_ age-secret-key"),
)
# fmt: on
_NEEDLES = tuple((word, form) for form in FORMS for word in form.needles.split())

KEY_MARK = "PRIVATE KEY"
_KEY_LABEL = rf"[A-Z0-9 ]{{0,40}}{KEY_MARK}(?: BLOCK)?-----"
_KEY_BEGIN, _KEY_END = re.compile(f"-----BEGIN {_KEY_LABEL}"), re.compile(f"-----END {_KEY_LABEL}")
_KEY = re.compile(f"-----BEGIN {_KEY_LABEL}.*?-----END {_KEY_LABEL}")
_KEY_BODY = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}|^\s*[A-Za-z0-9+/]+={0,2}\s*$|[A-Za-z0-9+/]+={1,2}\s*$")
KEY_LINES = 256
"""A private key has no more: those of RSA with 16,384 bits have 200."""

_SHORTEST, _ANYWHERE = 6, 12
"""Characters. Shorter values are not searched for: they would redact ordinary words. Longer ones than the second are
also found within a word."""
_PATH = r"~?(?:/[\w.@+-]+)+/?"
_NO_SECRET = re.compile(
    rf"[\d.,:+-]{{1,16}}|{_PATH}(?::{_PATH})*|(?i:offline|online|disabled|enabled|warning|critical|default|detail"
    r"|forkserver|localhost|always|highest|medium|bfloat16|float16|float32|inductor|dryrun|shared)"
)
"""Values of [job] env that say nothing: numbers, paths, common settings."""


def is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def is_public(name: str) -> bool:
    """The value of this variable of [job] env may be shown: a setting of MLX or NCCL. Any other may be a credential,
    whatever its name."""
    return name.startswith(("MLX_", "NCCL_")) and not is_secret(name)


class KeyLines:
    """Takes the lines of a text in order, without what is of a private key (PEM), whose end may be missing."""

    def __init__(self, *, inside: bool = False) -> None:
        """`inside`: the first line may be one of a key that began before."""
        self._left = KEY_LINES if inside else 0

    def __call__(self, line: str) -> str:
        if KEY_MARK not in line:
            self._left = max(0, self._left - 1)
            return _KEY_BODY.sub(REDACTED, line) if self._left else line
        line = _KEY.sub(REDACTED, line)
        if self._left and (end := _KEY_END.search(line)) is not None:
            self._left, line = 0, REDACTED + line[end.end() :]
        if (begin := _KEY_BEGIN.search(line)) is not None:
            self._left, line = KEY_LINES, line[: begin.start()] + REDACTED
        return line

    @property
    def inside(self) -> bool:
        """The next line may be one of a key."""
        return self._left > 0


class Redactor:
    """Takes secrets out of texts. Made once for many."""

    def __init__(self, of_job: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        """`of_job`: variables that are secrets whatever their names, as of [job] env. `environment`: of which those
        with a secret's name are; by default this process's."""
        values = _values(of_job or {}, os.environ if environment is None else environment)
        # A value of several lines is shown line by line, and one with quotes escaped.
        shown = {form for value in values for line in value.splitlines() for form in (line, json.dumps(line)[1:-1])}
        # The longest first, so that a value within another leaves no remainder.
        self._values = sorted((value for value in shown if len(value) >= _SHORTEST), key=len, reverse=True)
        self._expression = re.compile("|".join(map(_place, self._values)))

    def __call__(self, text: str) -> str:
        """`text`, of one line or several, without secrets."""
        if KEY_MARK in text:
            begin, end = _KEY_BEGIN.search(text), _KEY_END.search(text)
            inside = end is not None and (begin is None or end.start() < begin.start())
            text = "\n".join(map(KeyLines(inside=inside), text.split("\n")))
        if any(value in text for value in self._values):
            text = self._expression.sub(REDACTED, text)
        folded = text.lower()
        close = [(word, form) for word, form in _NEEDLES if word in folded]
        forms = [form for word, form in close if not form.after or re.search(word + form.after, folded)]
        for form in dict.fromkeys(forms):
            text = form.expression.sub(_without, text)
        return text

    def words(self, words: Sequence[str]) -> list[str]:
        """The words of a command without credentials, also in the word after an option: `--hf_token VALUE`."""
        shown = list[str]()
        for option, word in zip(("", *words), words, strict=False):
            begin = f"{option}=" if option.startswith("--") and "=" not in option else ""
            before, mark, after = self(begin + word).removeprefix(begin).partition(REDACTED)
            # The whole word is the option's value, with its spaces.
            whole = mark and word.startswith(before) and re.fullmatch(r"--[\w-]+=", begin + before)
            shown.append(before + mark + ("" if whole else after))
        return shown

    def document(self, document: Any) -> Any:
        """A JSON-like document with every string redacted, and every value under the name of a secret."""
        if isinstance(document, str):
            return self(document)
        if isinstance(document, Mapping):
            return {
                self(str(key)): REDACTED if is_secret(str(key)) and isinstance(value, str) else self.document(value)
                for key, value in document.items()
            }
        if isinstance(document, list | tuple | set | frozenset):
            items = list(document)
            return self.words(items) if all(isinstance(item, str) for item in items) else [*map(self.document, items)]
        return document


def _values(variables: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[str]:
    yield from (value for name, value in environment.items() if is_secret(name))
    for name, value in variables.items():
        if is_secret(name) or not (is_public(name) or _NO_SECRET.fullmatch(value)):
            yield value


def _place(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _ANYWHERE else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"


def _without(match: re.Match[str]) -> str:
    return (match.groupdict().get("before") or "") + REDACTED


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without secrets: values of secret variables in `environment` (by default this process's), and what has a
    secret's name or form."""
    return Redactor(environment=environment)(text)
