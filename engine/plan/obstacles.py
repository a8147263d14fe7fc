"""Obstacles that would end a rank after it has loaded its model, refused before the launch: from the job's keys,
config.json, and what the nodes report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import InputError, spans
from engine.plan.context import PlanContext
from engine.plan.document import Rationale
from engine.plan.memory.architecture import Architecture, Layer, Matrix
from engine.plan.memory.shape import OF_LAYER, ModelShape, quantized_as, trained_element_bytes
from engine.protocol.launchers import nested_in_command
from engine.protocol.partition import version_numbers
from engine.security.sanitise import plain

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json in mlx-lm's models of experts."""
_LORA = 'set fine_tune_type = "lora"'
_TRIED = (0, 32, 2)
"""The newest mlx-lm in which the following was found: a later one may train them."""
_ALL_MATRICES = "by adapters of all matrices"
_NO_GRADIENT = ("it is computed by Metal kernels, of which MLX has no gradient", "choose a model of another type")
_UNTRAINED = (
    ("afm7", "with DoRA", "it has none for its fused matrices", _LORA),
    ("afm7", "with grad_checkpoint", "its gradients would be wrong", "set grad_checkpoint = false"),
    ("afm7", "with packed weights", "it cannot load them", "name the unquantized model"),
    ("bitnet", "", *_NO_GRADIENT),
    ("deepseek_v41", "", "MLX has no gradient of the way in which its experts are chosen", _NO_GRADIENT[1]),
    ("gemma3n", _ALL_MATRICES, "it reads past them in altup", 'name some in lora_parameters.keys ("self_attn.q_proj")'),
    ("muse_spark", "", *_NO_GRADIENT),
    ("olmo", "", "its attention expects a mask of another form", "choose OLMo 2 or 3"),
    ("recurrent_gemma", "", "its class cannot be frozen", _NO_GRADIENT[1]),
    ("rwkv7", "on Metal", *_NO_GRADIENT),
)
"""model_type or quant_method; how mlx-lm cannot train it, "" for not at all; why; and what to do:
`python -m tests.bench.models` tries every one."""


def refuse_obstacles(context: PlanContext) -> None:
    context.refusals.extend(context.obstacles)
    nested = nested_in_command(context.job.words, context.job.framework)
    if nested is not None and context.ranks > 1:
        (context.refuse if nested.certain else context.warn)("command", str(nested))
    _refuse_mixed_devices(context)
    config = context.model
    if config is None or not context.settings:
        return
    architecture, text = _architecture(config), config.get("text_config")
    counts = (table.get(key) for table in (config, text) if isinstance(table, Mapping) for key in _EXPERTS)
    has_experts = any(isinstance(count, int) and count > 1 for count in counts)
    if architecture is not None:
        has_experts = any(matrix.copies > 1 for layer in architecture.layers for matrix in layer.matrices)
    _MODEL_OBSTACLES[context.job.framework](context, config, has_experts)
    # Where transformers has one array for all experts, peft finds no matrices of theirs.
    if not context.full and not (has_experts and context.job.kind.framework.adapters == "peft"):
        _check_adapters(context, architecture, has_experts=has_experts)


def _torch_obstacles(context: PlanContext, config: Mapping[str, Any], _: bool) -> None:
    packed = quantized_as(config)
    if isinstance(config.get("quantization"), Mapping):
        text = f"PyTorch cannot load the weights that MLX has quantized ({packed})"
        context.refuse("model", text, todo='name the original model, or set framework = "mlx"')
    else:
        _refuse_quantized(context, packed, "it has no gradients")


def _mlx_obstacles(context: PlanContext, config: Mapping[str, Any], has_experts: bool) -> None:
    packed = quantized_as(config)
    _refuse_quantized(context, packed, "MLX has no gradients for quantized weights")
    _refuse_untrained(context, str(config.get("model_type")).removesuffix("_text"), packed)
    on_cpu = [name for name in context.names if (fact := context.facts.get(name)) and fact.gpu == "cpu"]
    if has_experts and packed is None and on_cpu and trained_element_bytes(config, "full") < 4:
        why = f"the model has experts in 16 bits, which MLX computes on a GPU alone, and {', '.join(on_cpu)} has none"
        todo = "use the model in float32 or quantized there (`mlx_lm.convert`), or nodes with a GPU"
        context.refuse("model", why, todo=todo)


_MODEL_OBSTACLES = {"mlx": _mlx_obstacles, "torch": _torch_obstacles}


def _refuse_quantized(context: PlanContext, packed: str | None, why: str) -> None:
    if context.full and packed is not None:
        text = f'fine_tune_type = "full" cannot train a quantized model ({packed}): {why}'
        context.refuse("fine_tune_type", text, todo=f"{_LORA}, or name the unquantized model")


def _refuse_mixed_devices(context: PlanContext) -> None:
    """Every strategy has copies that each rank updates by itself: all parameters (data), those that are not divided
    (sharded), the embeddings (pipeline), the averaged weights (local)."""
    devices = {name: fact.mlx_device for name in context.names if (fact := context.facts.get(name)) is not None}
    kinds = [kind for kind in dict.fromkeys(devices.values()) if kind is not None]
    if "CUDA" not in kinds or len(kinds) == 1:
        return
    where = ", ".join(f"{kind} on {spans(name for name in devices if devices[name] == kind)}" for kind in kinds)
    text = f"MLX computes with {where}: each rounds the same update in its own way, and the ranks' copies drift apart"
    (context.refuse if context.settings else context.warn)("nodes", f"{text}; choose nodes of one kind")


def _refuse_untrained(context: PlanContext, kind: str, packed: str | None) -> None:
    """Refuse what mlx-lm itself cannot train, unless all nodes have a newer one than was tried."""
    facts = [fact for name, fact in context.facts.items() if name in context.names]
    if facts and all(version_numbers(fact.mlx_lm) > _TRIED for fact in facts):
        return
    all_matrices = not context.full and (context.settings.get("lora_parameters") or {}).get("keys") is None
    applies = {
        "": True,
        _ALL_MATRICES: all_matrices,
        "with DoRA": all_matrices and context.job.fine_tune_type == "dora",
        "with grad_checkpoint": context.settings.get("grad_checkpoint") not in (None, False, "auto"),
        "with packed weights": packed is not None,
        "on Metal": any((fact.system, fact.gpu) == ("Darwin", "gpu") for fact in facts),
    }
    for name, how, why, todo in _UNTRAINED:
        if name in (kind, packed) and applies[how]:
            context.refuse("model", f"mlx-lm cannot train a model of type {name}{how and ' '}{how}: {why}", todo=todo)


def knows_matrices(config: Mapping[str, Any]) -> bool:
    """The names of the model's matrices follow from its config.json; else only a node can tell them."""
    return _architecture(config) is not None


def _architecture(config: Mapping[str, Any]) -> Architecture | None:
    with contextlib.suppress(InputError):
        return ModelShape.from_config(config).architecture
    return None


def _check_adapters(context: PlanContext, architecture: Architecture | None, *, has_experts: bool) -> None:
    """Refuse DoRA for experts, and keys that name no matrix."""
    keys: Sequence[str] | None = (context.settings.get("lora_parameters") or {}).get("keys")
    dora = context.job.fine_tune_type == "dora"
    if architecture is None:
        # Where the names of the matrices are not known, keys are taken at their word.
        if dora and keys is None and has_experts:
            _refuse_dora(context, "self_attn.o_proj")
        return
    trained = architecture.layers[-max(int(context.settings["num_layers"]), 0) :]
    names = {matrix.name: matrix for layer in trained for matrix in layer.matrices}
    by_key = {key: _matrices(architecture, trained, key) for key in (names if keys is None else keys)}
    if dora and any(matrix.copies > 1 for matrices in by_key.values() for matrix in matrices):
        _refuse_dora(context, *(name for name, matrix in names.items() if matrix.copies == 1))
    missing = [key for key, matrices in by_key.items() if not matrices]
    if len(missing) == len(by_key):
        context.refuse("lora_parameters", *nothing_trained(missing, names))
    elif missing:
        context.warn("lora_parameters", unmatched(missing, names))


def unmatched(keys: Iterable[str], names: Iterable[str]) -> str:
    """Description of keys beside others that name matrices. `names`: of the trained layers'."""
    text = f"no matrix is called {_listed(keys)}, as lora_parameters.keys says: the trained layers have"
    return f"{text} {', '.join(names)}"


def nothing_trained(keys: Iterable[str], names: Iterable[str]) -> tuple[str, None, str]:
    """The arguments of a refusal. `names`: of the trained layers' matrices."""
    listed = f" ({_listed(keys)})" if keys else ""
    text = f"lora_parameters.keys{listed} name no matrix of the trained layers, so that nothing is trained"
    return text, None, f"remove keys to adapt all matrices, or choose some: the trained layers have {', '.join(names)}"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(plain(key, 60) for key in keys)


def _refuse_dora(rationale: Rationale, *names: str) -> None:
    others = ", ".join(f'"{name}"' for name in names)
    todo = f"{_LORA}, or name other matrices in lora_parameters.keys, such as [{others}]"
    why = 'fine_tune_type = "dora" cannot adapt a mixture of experts: mlx-lm has no DoRA for them'
    rationale.refuse("fine_tune_type", why, todo=todo)


def _matrices(architecture: Architecture, trained: Sequence[Layer], key: str) -> list[Matrix]:
    """Those that mlx-lm adapts for a key: by a name within a trained layer, or by a path in the whole model."""
    matrices = [matrix for layer in trained for matrix in layer.matrices if matrix.name == key]
    path = OF_LAYER.search(key)
    if path is not None and int(path["number"]) < len(architecture.layers):
        numbered = architecture.layers[int(path["number"])]
        matrices += [matrix for matrix in numbered.matrices if matrix.name == path["name"]]
    outside = filter(None, (architecture.embedding, architecture.head))
    return matrices + [matrix for matrix in outside if f".{key}".endswith(f".{matrix.name}")]
