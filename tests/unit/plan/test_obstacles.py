"""What a rank would fail for is refused by the plan, with what to change, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING

from engine.plan.document import PlanIssue, TrainingPlan
from engine.plan.memory.shape import quantized_as
from engine.plan.planner import make_plan
from engine.protocol.partition import SPLITTABLE_MODULES, mlx_module
from tests.bench.tiny_models import model_types
from tests.unit.plan.clusters import QWEN3_4B, inputs, mac, ultra_and_max
from tests.unit.plan.memory.tiny import TINY

PACKED = {"quantization": {"group_size": 32, "bits": 4}}


def planned(model: dict[str, Any], settings: dict[str, Any], **more: Any) -> TrainingPlan:
    return make_plan(inputs(ultra_and_max(), settings={"batch_size": 2, **settings}, model=model, **more))


def refused(plan: TrainingPlan) -> dict[str, str]:
    return {issue.name: issue.text for issue in plan.refusals}


def test_full_fine_tuning_of_a_quantized_model_is_refused_with_what_trains_it() -> None:
    found = refused(planned(QWEN3_4B | PACKED, {"fine_tune_type": "full"}))
    assert "cannot train a quantized model (4 bits)" in found["fine_tune_type"]
    assert 'set fine_tune_type = "lora", or name the unquantized model' in found["fine_tune_type"]
    assert refused(planned(QWEN3_4B | PACKED, {"fine_tune_type": "lora"})) == {}
    assert refused(planned(QWEN3_4B, {"fine_tune_type": "full"})) == {}


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        ({}, None),
        ({"quantization": {"group_size": 64, "bits": 8}}, "8 bits"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        (
            {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}},
            "fp8",
        ),
        # mlx-lm unpacks these on loading.
        ({"quantization_config": {"quant_method": "fp8"}}, None),
        ({"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}}, None),
        ({"quantization": [], "quantization_config": "4bit", "text_config": 3}, None),
    ],
)
def test_a_model_is_quantized_where_mlx_lm_keeps_it_so(config: dict[str, Any], packed: str | None) -> None:
    assert quantized_as(config) == packed


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "nemotron_h"])
def test_dora_of_experts_is_refused_with_the_matrices_that_it_can_adapt(kind: str) -> None:
    found = refused(planned(TINY[kind], {"fine_tune_type": "dora", "num_layers": -1}))
    assert "mlx-lm has no DoRA for them" in found["fine_tune_type"] and 'set fine_tune_type = "lora"' in str(found)
    others = [part.strip(' "') for part in found["fine_tune_type"].split("[")[1].rstrip("]").split(",")]
    assert others and not any("switch_mlp" in name for name in others)
    adapted = {"fine_tune_type": "dora", "num_layers": -1, "lora_parameters": {"rank": 8, "keys": others}}
    assert refused(planned(TINY[kind], adapted)) == {}


def test_dora_of_layers_without_experts_is_accepted() -> None:
    """Of these three layers the second one alone is dense."""
    last_dense = TINY["qwen3_moe"] | {"mlp_only_layers": [2]}
    assert refused(planned(last_dense, {"fine_tune_type": "dora", "num_layers": 1})) == {}
    assert "fine_tune_type" in refused(planned(last_dense, {"fine_tune_type": "dora", "num_layers": 2}))


def test_experts_of_a_model_whose_matrices_are_not_known_are_counted_in_its_config() -> None:
    unknown = {"model_type": "deepseek_v3", "n_routed_experts": 256}
    assert "fine_tune_type" in refused(planned(unknown, {"fine_tune_type": "dora"}))
    assert refused(planned(unknown, {"fine_tune_type": "lora"})) == {}
    keys = {"fine_tune_type": "dora", "lora_parameters": {"rank": 8, "keys": ["self_attn.o_proj"]}}
    assert refused(planned(unknown, keys)) == {}


def with_keys(*keys: str, layers: int = -1) -> dict[str, Any]:
    return {"num_layers": layers, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": list(keys)}}


@pytest.mark.parametrize("keys", [(), ("q_proj",), ("self_attn.q_prj", "mlp")])
def test_keys_that_leave_nothing_to_train_are_refused_with_those_there_are(keys: tuple[str, ...]) -> None:
    found = refused(planned(QWEN3_4B, with_keys(*keys)))["lora_parameters"]
    assert "nothing is trained" in found and "self_attn.q_proj, self_attn.k_proj" in found
    assert all(key in found for key in keys)


@pytest.mark.parametrize(
    "key", ["self_attn.q_proj", "model.layers.3.mlp.up_proj", "model.embed_tokens", "model.layers.35.self_attn.o_proj"]
)
def test_a_key_names_a_matrix_within_a_layer_or_in_the_whole_model(key: str) -> None:
    plan = planned(QWEN3_4B, with_keys(key))
    assert refused(plan) == {} and not any(issue.name == "lora_parameters" for issue in plan.warnings)


def test_a_key_of_layers_that_are_not_trained_leaves_nothing_to_train() -> None:
    first_sparse = TINY["qwen3_moe"] | {"mlp_only_layers": [1, 2]}
    experts = "mlp.switch_mlp.up_proj"
    assert refused(planned(first_sparse, with_keys(experts))) == {}
    assert "lora_parameters" in refused(planned(first_sparse, with_keys(experts, layers=2)))


def test_one_key_that_names_nothing_beside_others_is_a_warning() -> None:
    plan = planned(QWEN3_4B, with_keys("self_attn.q_proj", "self_attn.v_prj"))
    assert refused(plan) == {}
    assert "no matrix is called self_attn.v_prj" in next(
        issue.text for issue in plan.warnings if issue.name == "lora_parameters"
    )


def test_experts_in_16_bits_are_refused_on_nodes_without_a_gpu() -> None:
    """MLX 0.32.4: [GatherMM::eval] Currently only supports float32."""
    nodes = [mac("box", 0, "", 64, system="Linux", gpu="cpu"), mac("max", 1, "Apple M4 Max", 128)]
    experts = TINY["mixtral"] | {"torch_dtype": "bfloat16"}
    for config, expected in ((experts, {"model"}), (TINY["mixtral"], set()), (experts | PACKED, set())):
        plan = make_plan(inputs(nodes, settings={"batch_size": 2}, model=config))
        assert set(refused(plan)) == expected
    assert "box has none" in refused(make_plan(inputs(nodes, settings={"batch_size": 2}, model=experts)))["model"]


def test_a_strategy_that_cannot_divide_the_model_is_refused_with_one_that_can() -> None:
    found = refused(planned(TINY["gemma3_text"], {}, strategy="sharded"))["strategy"]
    assert "sharded does not support model_type gemma3_text" in found and 'set strategy = "data"' in found


def test_what_a_node_has_reported_is_among_the_refusals() -> None:
    issue = PlanIssue(name="report_to", text="report_to names wandb, which python cannot import; install it")
    assert issue in planned(QWEN3_4B, {}, obstacles=(issue,)).refusals


@pytest.mark.parametrize(
    ("words", "refuses"),
    [(("bash", "-c", "torchrun --standalone t.py"), True), (("trl", "sft"), False), (("python", "t.py"), None)],
)
def test_a_launcher_within_the_command_is_refused_or_warned_of_where_there_are_several_ranks(
    words: tuple[str, ...], refuses: bool | None
) -> None:
    job = {"command": words, "model": None, "data": None}
    several, one = (make_plan(inputs(nodes, job=job, model=None)) for nodes in (ultra_and_max(), ultra_and_max()[:1]))
    found = {True: several.refusals, False: several.warnings}
    assert {key: any(issue.name == "command" for issue in issues) for key, issues in found.items()} == {
        key: key is refuses for key in (True, False)
    }
    assert not any(issue.name == "command" for issue in (*one.refusals, *one.warnings))


UNTRAINED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "deepseek_v41_text"}, {}, "type deepseek_v41: MLX has no gradient of the way in which"),
    ({"model_type": "muse_spark"}, {"fine_tune_type": "full"}, "type muse_spark: it is computed by Metal kernels"),
    ({"model_type": "recurrent_gemma"}, {}, "type recurrent_gemma: its class cannot be frozen"),
    ({"model_type": "rwkv7"}, {}, "type rwkv7 on Metal: it is computed by Metal kernels"),
    ({"model_type": "gemma3n"}, {}, 'past them in altup; name some in lora_parameters.keys ("self_attn.q_proj")'),
    (
        {"model_type": "afm7"},
        {"fine_tune_type": "dora"},
        "with DoRA: it has none for its fused matrices; set fine_tune_type",
    ),
    ({"model_type": "afm7"}, {"grad_checkpoint": True}, "with grad_checkpoint: its gradients would be wrong"),
    ({"model_type": "afm7", **PACKED}, {}, "with packed weights: it cannot load them; name the unquantized model"),
    # Falcon-E is a Llama of such weights.
    (
        QWEN3_4B | {"quantization_config": {"quant_method": "bitnet"}},
        {},
        "type bitnet: it is computed by Metal kernels",
    ),
]


@pytest.mark.parametrize(("model", "settings", "text"), UNTRAINED)
def test_a_model_that_mlx_lm_cannot_train_is_refused_by_name_with_the_reason(
    model: dict[str, Any], settings: dict[str, Any], text: str
) -> None:
    found = refused(planned(model, settings))["model"]
    assert found.startswith("mlx-lm cannot train a model of type ") and text in found


@pytest.mark.parametrize(
    ("kind", "settings", "facts"),
    [
        ("rwkv7", {}, {"system": "Linux", "gpu": "cpu"}),
        ("gemma3n", {"fine_tune_type": "full"}, {}),
        ("gemma3n", with_keys("self_attn.q_proj"), {}),
        ("afm7", {}, {}),
        ("afm7", with_keys("self_attn.out_proj") | {"fine_tune_type": "dora", "grad_checkpoint": False}, {}),
        # What a newer mlx-lm cannot train is not known.
        ("deepseek_v41", {}, {"mlx_lm": "0.33.0"}),
    ],
)
def test_what_it_can_train_otherwise_or_perhaps_is_not_refused(
    kind: str, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    nodes = [mac(name, rank, "", 512, **facts) for rank, name in enumerate(("one", "two"))]
    assert refused(make_plan(inputs(nodes, settings={"batch_size": 2, **settings}, model={"model_type": kind}))) == {}


def test_one_node_with_the_mlx_lm_that_was_tried_is_enough_to_refuse() -> None:
    nodes = [mac("old", 0, "", 512, mlx_lm="0.32.2"), mac("new", 1, "", 512, mlx_lm="0.33.0")]
    plan = make_plan(inputs(nodes, settings={"batch_size": 2}, model={"model_type": "muse_spark"}))
    assert "muse_spark" in refused(plan)["model"]


@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_a_strategy_that_divides_models_names_each_type_that_it_cannot_divide(strategy: str) -> None:
    for kind in model_types():
        found, module = refused(planned({"model_type": kind}, {}, strategy=strategy)), MODEL_REMAPPING.get(kind, kind)
        assert ("strategy" in found) is (module not in SPLITTABLE_MODULES)
        if "strategy" in found:
            assert f"{strategy} does not support model_type {kind}" in found["strategy"]


def test_each_type_that_mlx_lm_runs_as_a_divisible_one_is_known() -> None:
    runs_as = {kind: module for kind, module in MODEL_REMAPPING.items() if module in SPLITTABLE_MODULES}
    assert {kind: mlx_module(kind) for kind in model_types() if mlx_module(kind) != kind} == runs_as
