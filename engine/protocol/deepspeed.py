"""The content of ds_config.json: written by the plan for DeepSpeed's own tools, and used by the trainer. Keys and
meanings: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

from typing import Any

from engine.protocol.job import TorchSettings

DEEPSPEED_CONFIG_ENV = "FLIGHTDECK_DEEPSPEED_CONFIG"
"""The path of a ds_config.json that the trainer takes instead of its own configuration."""
BUCKET_ELEMENTS = 200_000_000
"""Elements of one bucket of gradients (reduce_bucket_size) or of parameters, the size in DeepSpeed's own examples."""


def deepspeed_config(
    settings: TorchSettings, *, micro_batch: int, accumulation: int, world_size: int, max_grad_norm: float | None
) -> dict[str, Any]:
    """`micro_batch`: sequences per rank and iteration. Any precision but "bf16" and "fp16" is float32."""
    stage, offload = settings.zero_stage, settings.offload
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    else:
        # In full when saved, so that what was trained loads elsewhere.
        zero |= {"stage3_prefetch_bucket_size": BUCKET_ELEMENTS // 4, "stage3_gather_16bit_weights_on_model_save": True}
    if offload != "none":
        place: dict[str, Any] = {"device": offload, "pin_memory": True}
        if offload == "nvme":
            place["nvme_path"] = settings.nvme_path
        zero["offload_optimizer"] = place
        if stage == 3:
            zero["offload_param"] = dict(place)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * world_size,
        "zero_optimization": zero,
        # Optimizers of PyTorch and ours, not DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # 0 is none; without the key Accelerate clips to 1.
        "gradient_clipping": max_grad_norm or 0.0,
    }
    if settings.precision in ("bf16", "fp16"):
        # Gradients travel compressed to 16 bits; it is DeepSpeed's default, too.
        config["communication_data_type"] = settings.precision
        # 0: the scale is dynamic.
        config[settings.precision] = {"enabled": True, **({"loss_scale": 0} if settings.precision == "fp16" else {})}
    return config
