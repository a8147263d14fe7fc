"""Redacts secrets from everything logged, journalled or exported: by name, by form, and by value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
SECRET_NAMES = re.compile(r"(?:TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|PRIVATE_?KEY)$", re.IGNORECASE)
"""Endings of the names of variables that hold secrets, such as HF_TOKEN or WANDB_API_KEY."""
_SPECIAL_NAMES = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"})
_ASSIGNED = re.compile(
    r"(?P<name>\b[A-Za-z0-9_]*(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD|PASSWD))(?P<sign>[\"']?\s*[=:]\s*[\"']?)"
    r"(?P<value>[^\s\"',;}&]{6,})",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}\b"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{16,}=*"
)
_IN_URL = re.compile(
    # A password after any scheme; after http also a token alone, which ssh://git@host is not.
    r"(?P<before>\bhttps?://(?=[^\s/?#\"'<>]+@)|(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,31}://(?=[^\s/?#\"'<>:@]*:[^\s/?#\"'<>]+@))"
    r"[^\s/?#\"'<>]+(?=@)"
)
_IN_QUERY = re.compile(
    r"(?P<before>[?&](?:[A-Za-z0-9_-]*-)?(?:sig|signature|credential|key|password|secret|token)=)[^\s&#\"'<>]+",
    re.IGNORECASE,
)
"""Signed URLs (X-Amz-Signature, Azure's sig) and keys."""
_SHORTEST = 6
"""Shorter values are not searched for: they would redact ordinary words."""


def is_secret(name: str) -> bool:
    """`name` is that of a variable or key."""
    return name.upper() in _SPECIAL_NAMES or SECRET_NAMES.search(name) is not None


def is_public(name: str) -> bool:
    """The value of this variable of [job] env may be shown: a setting of MLX or NCCL. Any other may be a credential,
    whatever its name."""
    return name.startswith(("MLX_", "NCCL_")) and not is_secret(name)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without secrets: values of secret variables in `environment` (by default this process's), assignments to
    a secret's name, credentials in URLs, and tokens of known forms."""
    known = os.environ if environment is None else environment
    secrets = {value for name, value in known.items() if is_secret(name) and len(value) >= _SHORTEST}
    # The longest first, so that a value within another leaves no remainder.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    for place in (_IN_URL, _IN_QUERY):
        text = place.sub(rf"\g<before>{REDACTED}", text)
    text = _ASSIGNED.sub(rf"\g<name>\g<sign>{REDACTED}", text)
    return _FORMS.sub(REDACTED, text)


def redact_document(document: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A JSON-like document with every string redacted, and every value under the name of a secret."""
    if isinstance(document, str):
        return redact(document, environment)
    if isinstance(document, Mapping):
        return {
            redact(str(key), environment): (
                REDACTED if is_secret(str(key)) and isinstance(value, str) else redact_document(value, environment)
            )
            for key, value in document.items()
        }
    if isinstance(document, (list, tuple, set, frozenset)):
        return [redact_document(item, environment) for item in document]
    return document
