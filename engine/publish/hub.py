"""Uploads to the Hugging Face Hub by its own library, which leaves out what has arrived before; a model's config.json.
The token is the library's: HF_TOKEN, or that of `hf auth login`."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_session, get_token, hf_hub_url
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine.errors import FlightDeckError, InputError
from engine.publish.model_card import TrainedRun, model_card
from engine.publish.model_folder import ModelFolder
from engine.security.redact import redact
from engine.security.sanitise import plain

_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9](?!.*(?:--|\.\.))[\w.-]{0,94}")
_WEIGHTS = ["model*.safetensors", "model*.safetensors.index.json", "adapter*.safetensors", "adapter_config.json"]
"""Programs load these of a repository, those of an earlier upload with those of this one."""
_ANSWERS_WITHIN_S = 10.0
_LOGIN = "log in with a token that may write: hf auth login, or HF_TOKEN"


def _redacted(text: str) -> str:
    return redact(text, {**os.environ, "HF_TOKEN": get_token() or ""})


def _log_filter(record: logging.LogRecord) -> bool:
    """The library's log has signed addresses."""
    record.msg, record.args = _redacted(record.getMessage()), None
    return True


def check_repository(name: str) -> None:
    """Raises InputError for what is no repository's name, and where nobody is logged in."""
    if _NAME.fullmatch(name) is None:
        raise InputError(f"{ascii(name)[:100]} is no repository's name", todo="give OWNER/NAME")
    if get_token() is None:
        raise InputError("nobody is logged in to the Hub", why="HF_TOKEN is not set", todo=_LOGIN)


def upload(run: TrainedRun, folder: ModelFolder) -> str:
    """Create the repository where it is not there, and upload the folder with a model card; the commit's address.
    Blocking. Raises InputError where it cannot go there, FlightDeckError where it broke off, OSError."""
    private, repository = run.request.private, run.request.place or ""
    check_repository(repository)
    if not run.request.progress_bars:
        disable_progress_bars()
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_log_filter)
    name, api = repository.partition("/")[2], HfApi(library_name="mlx-flightdeck")
    with tempfile.TemporaryDirectory(prefix="flightdeck-") as scratch:
        folder.copy(Path(scratch), run.base, lambda source, name: name.symlink_to(source))
        Path(scratch, "README.md").write_text(model_card(run, folder, name, _usage(run, folder, repository)), "utf-8")
        try:
            api.create_repo(repository, private=private or None, exist_ok=True)
            if not private or api.repo_info(repository).private:
                uploaded = api.upload_folder(
                    repo_id=repository,
                    folder_path=scratch,
                    commit_message="Upload a run",
                    delete_patterns=_WEIGHTS,
                )
                return str(uploaded)
        except Exception as error:  # As many kinds as the library has parts.
            refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
            todo = _LOGIN if refused else "run the same command again: what has arrived is not sent twice"
            what = "the upload did not complete"
            raise FlightDeckError(what, where=repository, why=_reason(error), todo=todo) from None
    raise InputError("the repository is public", where=repository, todo="make it private on the Hub first")


def read_configuration(model: str) -> bytes:
    """config.json of a folder, or itself, on this machine; else of OWNER/NAME on the Hub, and nothing but that.
    Blocking. Raises InputError."""
    path, token = Path(model).expanduser(), get_token()
    try:
        if path.exists() or model.count("/") != 1:
            return (path / "config.json" if path.is_dir() else path).read_bytes()
        # Not the library's headers: to make them it fetches a list of programs that may run it.
        address, headers = hf_hub_url(model, "config.json"), {"Authorization": f"Bearer {token}"} if token else {}
        response = get_session().get(address, headers=headers, follow_redirects=True, timeout=_ANSWERS_WITHIN_S)
        hf_raise_for_status(response)
        return response.content
    except Exception as error:  # As many kinds as the library has parts.
        todo = "name a folder, a config.json, or OWNER/NAME of the Hub, with HF_TOKEN where it asks who you are"
        raise InputError(f"{model} has no config.json that can be read", why=_reason(error), todo=todo) from None


def _reason(error: Exception) -> str:
    texts = dict.fromkeys(" ".join(f"{fault}".split()) for fault in (error, error.__cause__) if fault)
    return plain(_redacted(" ".join(filter(None, texts))), 300) or type(error).__name__


def _usage(run: TrainedRun, folder: ModelFolder, repository: str) -> list[str]:
    base, generate = run.base_on_hub or f"PATH_OF_{run.base}", 'mlx_lm.generate --prompt "..." --model'
    if folder.library == "transformers":
        return [f"transformers chat {repository}"]
    if folder.library == "peft":
        load = f"PeftModel.from_pretrained(M.from_pretrained('{base}'), '{repository}')"
        return [f'python -c "from peft import PeftModel; from transformers import AutoModelForCausalLM as M; {load}"']
    if folder.holds == "model":
        return [f"{generate} {repository}"]
    return [f"hf download {repository} --local-dir adapter", f"{generate} {base} --adapter-path adapter"]
