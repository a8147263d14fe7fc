"""The `model` and `configuration` probes: what lies in a model directory. Nothing of it is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from engine.node.probes import did_you_mean, reason_of
from engine.protocol.attempt import open_regular, read_regular
from engine.protocol.safetensors import CheckpointError, check_header

CONFIGURATION = "config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
HASHED = (CONFIGURATION, INDEX, *TOKENIZER_FILES)
HASHED_LIMIT = 256 << 20
_VOCABULARIES = (TOKENIZER, "*.model", "vocab*", "*.tiktoken", "tekken.json", "tokenization_*.py")
_OTHER_WEIGHTS = ("*.gguf", "*.safetensors", "*.bin", "*.pth", "*.pt", "*.npz")
_GGUF = "GGUF, llama.cpp's format, cannot be trained: name the folder of the safetensors that it was made from"
_POINTER = b"version https://git-lfs"
_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|wte|word_embeddings|embed_in|embeddings)\.weight$")
_LAYER = re.compile(r"(?:layers|blocks|h)\.([0-9]{1,5})\.(.+)$")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_INVALID = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised by JSON of another form
_Tensors = dict[str, tuple[str, tuple[int, ...]]]


def probe_model(path: str) -> dict[str, Any]:
    """The answer is a ModelFiles of the head's; of the small files, those are hashed that decide what is trained."""
    directory = Path(path)
    report: dict[str, Any] = {"kind": "?", "bytes": 0, "shards": 0, "repository": None, "hashes": {}}
    report.update({name: [] for name in ("faults", "warnings", "doubts")})
    try:
        if (instead := something_else(directory)) is not None:
            report["faults"].append(instead)
        else:
            _examine(directory, report)
    except OSError as error:
        report["faults"].append(f"{Path(error.filename or path).name}: {reason_of(error, directory)}")
    return report


def something_else(path: Path) -> str | None:
    """Description of a path that is no model's folder."""
    if path.is_file():
        is_gguf = path.suffix == ".gguf" or _head(path, 4) == b"GGUF"
        return _GGUF if is_gguf else "a file, no directory: name the folder that it lies in"
    if not path.is_dir():
        dangling = f"a link to {path.readlink()}, which is not there" if path.is_symlink() else None
        return dangling or f"no such directory{did_you_mean(path, CONFIGURATION)}"
    if (path / CONFIGURATION).exists():
        return None
    if (path / "snapshots").is_dir():
        revisions = sorted(entry.name for entry in (path / "snapshots").iterdir())
        main = path / "refs" / "main"
        named = main.read_text().strip() if main.is_file() else ""
        chosen = named if named in revisions else "".join(revisions[-1:]) or "REVISION"
        return f"Hugging Face's cache of a model, which lies in {path / 'snapshots' / chosen}: name that folder"
    if (path / "adapter_config.json").is_file():
        return "an adapter, no model: name its base as model, and its weights in resume_adapter_file"
    return _GGUF if any(path.glob("*.gguf")) else None


def _examine(directory: Path, report: dict[str, Any]) -> None:
    shards, faults, configuration = sorted(directory.glob("model*.safetensors")), report["faults"], {}
    files = [*shards, *(directory / name for name in HASHED)]
    gone = [file.name for file in files if file.is_symlink() and not file.exists()]
    pointers = [file.name for file in files if file.is_file() and _head(file, len(_POINTER)) == _POINTER]
    irregular = [file.name for file in files if file.exists() and not file.is_file()]
    faults += [f"{name} is not a regular file" for name in irregular]
    faults += [f"{name} is a link to a file that is not there: download it again" for name in gone]
    faults += [f"{name} is a pointer of Git LFS: `git lfs pull` in its folder" for name in pointers]
    try:
        configuration = json.loads(read_regular(directory / CONFIGURATION))
        report["kind"] = str(configuration["model_type"])
        name = configuration.get("_name_or_path")
        report["quantized"] = isinstance(configuration.get("quantization"), dict)
        report["repository"] = name if isinstance(name, str) and _REPOSITORY.fullmatch(name) else None
    except FileNotFoundError:
        faults += [] if CONFIGURATION in gone else ["config.json is missing"]
    except _INVALID:
        faults.append("config.json is no model configuration (JSON with a model_type)")
    if not any(file.is_file() for pattern in _VOCABULARIES for file in directory.glob(pattern)):
        faults.append("no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)")
    shards = [shard for shard in shards if shard.name not in (*gone, *pointers, *irregular)]
    tensors: _Tensors = {}
    for shard in shards:
        try:
            tensors.update(check_header(shard, exact=False).tensors)
        except CheckpointError as error:
            faults.append(f"{shard.name} is cut off or damaged ({error}): download it again")
    faults += _shard_faults(directory, {shard.name for shard in shards}, tensors) if not (gone or pointers) else []
    if not faults:
        report["doubts"] += _doubts(directory, configuration, tensors)
        with contextlib.suppress(*_INVALID):
            _check_tokens(directory, tensors, report)
    report["shards"], report["bytes"] = len(shards), sum(shard.stat().st_size for shard in shards)
    report["hashes"] = {name: value for name in HASHED if (value := file_hash(directory / name)) is not None}
    report["hashes"].update({shard.name: f"{shard.stat().st_size} bytes" for shard in shards})


def _head(path: Path, size: int) -> bytes:
    with open_regular(path) as file:
        return file.read(size)


def _shard_faults(directory: Path, present: set[str], tensors: _Tensors) -> list[str]:
    """Shards whose tensors are nowhere: mlx-lm reads whatever lies there, and a model may have been saved anew beside
    an index of former shards."""
    index, numbered = directory / INDEX, [match for match in map(_NUMBERED.fullmatch, present) if match]
    count, lacking = 0, set[str]()
    if index.is_file():
        try:
            weights = json.loads(read_regular(index))["weight_map"]
            count, lacking = len(set(weights.values())), {str(weights[name]) for name in weights if name not in tensors}
        except _INVALID:
            return [f"{index.name} has no weight_map"]
    elif numbered and len(numbered) == len(present):
        count = max(int(match[2]) for match in numbered)
        expected = (f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))
        lacking = set(expected) - present
    missing = sorted(lacking - present)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return [f"{len(missing)} of {count} shards missing: {shown}"]
    if not present:
        others = (file.name for pattern in _OTHER_WEIGHTS for file in sorted(directory.glob(pattern)))
        other = next(others, None)
        return [f"no weights (model*.safetensors){f', only {other}' if other else ''}"]
    return [f"{min(lacking)} lacks tensors that the index places in it: download it again"] if lacking else []


def _doubts(directory: Path, configuration: dict[str, Any], tensors: _Tensors) -> list[str]:
    """Reasons why it may not load: only the framework's own code knows."""
    text: Any = {**configuration, **(configuration.get("text_config") or {})}
    layers: dict[int, set[str]] = {}
    for match in filter(None, map(_LAYER.search, tensors)):
        layers.setdefault(int(match[1]), set()).add(match[2])
    settings = _json(directory / "tokenizer_config.json")
    counts = [text[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in text]
    doubts = {
        "quantization_config": bool(text.get("quantization_config")) and not text.get("quantization"),
        "code of its own": not {"auto_map", "model_file"}.isdisjoint([*configuration, *settings]),
        "no tokenizer.json": not (directory / TOKENIZER).is_file(),
        "other layers": sorted(layers) != list(range(counts[0] if counts else 0)),
        "layers that differ": len(set(map(frozenset, layers.values()))) > 1,
        "no head": text.get("tie_word_embeddings") is False and not any("lm_head." in name for name in tensors),
        "other sizes": not _are_of_size(tensors, text),
    }
    return [name for name, doubtful in doubts.items() if doubtful]


def _json(path: Path) -> dict[str, Any]:
    """{} for any other document, and for none."""
    with contextlib.suppress(*_INVALID, FileNotFoundError):
        return dict(json.loads(read_regular(path)))
    return {}


def _are_of_size(tensors: _Tensors, text: dict[str, Any]) -> bool:
    """The embedding and the projections are as large as config.json makes those of most architectures."""
    hidden: Any
    hidden, inner, heads = (text.get(name) for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    try:
        width = text.get("head_dim") or hidden // heads
        queries, keys = heads * width, (text.get("num_key_value_heads") or heads) * width
    except (TypeError, ZeroDivisionError):
        return False
    expected = {"embed_tokens": (text.get("vocab_size"), hidden), "q_proj": (queries, hidden)}
    expected.update(dict.fromkeys(("k_proj", "v_proj"), (keys, hidden)), o_proj=(hidden, queries))
    expected.update(dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)), down_proj=(hidden, inner))
    for name, (dtype, shape) in tensors.items():
        part, sizes = name.split(".")[-2:][0], 1 if dtype == "U32" else 2
        is_known = name.endswith(".weight") and "expert" not in name and part in expected
        if is_known and shape[:sizes] != expected[part][:sizes]:
            return False
    return True


def _check_tokens(directory: Path, tensors: _Tensors, report: dict[str, Any]) -> None:
    """Tokens beyond the embedding, of which MLX reads whatever lies behind it. An added one that neither ends a text
    nor is in the chat template does no harm: some models have such a one for their images. Raises _INVALID."""
    embeddings = [shape[0] for name, (_, shape) in tensors.items() if _EMBEDDING.search(name) and shape]
    rows, file = max(embeddings, default=0), directory / TOKENIZER
    if not rows or not file.is_file() or file.stat().st_size > HASHED_LIMIT:
        return
    try:
        content = json.loads(read_regular(file))
    except ValueError:
        report["faults"].append("tokenizer.json is no JSON: download it again")
        return
    words = content["model"]["vocab"]
    last = max(words.values(), default=0) if isinstance(words, dict) else len(words) - 1
    if last >= rows:
        report["faults"].append(f"its tokenizer has tokens up to {last:,}, its embedding {rows:,} rows")
    beyond = {str(added["content"]): added["id"] for added in content.get("added_tokens") or () if added["id"] >= rows}
    settings = _json(directory / "tokenizer_config.json")
    used = [str(settings.get(name)) for name in ("bos_token", "eos_token", "chat_template")]
    with contextlib.suppress(FileNotFoundError):
        used.append(read_regular(directory / "chat_template.jinja").decode(errors="replace"))
    for token, number in beyond.items():
        text = f"token {token[:40]!r} is {number:,}, beyond the embedding's {rows:,} rows"
        report["faults" if any(token in setting for setting in used) else "warnings"].append(text)


def file_hash(path: Path) -> str | None:
    """SHA-256 of the file, its size if over the limit, or why it cannot be read; None if it is missing."""
    try:
        size = path.stat().st_size
        return f"{size} bytes" if size > HASHED_LIMIT else sha256(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        return reason_of(error, path)


def sha256(path: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


LIMIT_BYTES = 256 << 10
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def probe_configuration(directory: str) -> dict[str, Any]:
    """The model's config.json as `configuration`, or `problem`; `dtype`, in which most of its unquantized weights are
    stored, where their safetensors files have readable headers: mlx-lm trains in that type, whatever config.json says.
    """
    path = Path(directory) / CONFIGURATION
    try:
        with open_regular(path) as file:
            content = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        other = did_you_mean(path.parent, CONFIGURATION) if isinstance(error, FileNotFoundError) else ""
        return {"problem": f"{path}: {reason_of(error, path)}{other}"}
    if len(content) > LIMIT_BYTES:
        return {"problem": f"{path} is no model configuration: more than {LIMIT_BYTES >> 10} KiB"}
    try:
        configuration = json.loads(content)
    except (ValueError, RecursionError):
        configuration = None
    if not isinstance(configuration, dict):
        return {"problem": f"{path} is no model configuration: no JSON object"}
    if "quantization_config" not in configuration and (quantization := _json(path.parent / "hf_quant_config.json")):
        # As mlx-lm reads a file of NVIDIA's ModelOpt.
        configuration["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return {"configuration": configuration, "dtype": _stored_dtype(path.parent)}


def _stored_dtype(directory: Path) -> str | None:
    elements: Counter[str] = Counter()
    try:
        for shard in sorted(directory.glob("model*.safetensors")):
            for dtype, shape in check_header(shard).tensors.values():
                if dtype in _DTYPES:
                    elements[_DTYPES[dtype]] += prod(shape)
    except (OSError, CheckpointError):
        return None
    return max(elements, key=elements.__getitem__, default=None)
