"""transformers' Trainer as it is, with peft for LoRA, on the model, the tokens and the precision of a job of the
built-in trainer, in turns: `python -m tests.gpu.torch_plain REQUEST`; see torch_turns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from tests.gpu.torch_turns import Turn, read_request, say_ready


class Turns(TrainerCallback):  # type: ignore[misc]
    turn: Turn | None = None
    left = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        say_ready()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.turn is None:
            self.turn = Turn()
            self.left = self.turn.steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.turn is not None:
            self.turn.end()
            self.turn = None


def make_model(job: dict[str, Any]) -> Any:
    """As the built-in trainer has it: trained weights float32, a frozen base in the type of the computation."""
    full = job["fine_tune_type"] == "full"
    dtype = torch.float32 if full or job["precision"] == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, local_files_only=True)
    model.config.use_cache = False
    if full:
        return model
    blocks = model.model.layers.named_modules()
    linear = {name.rsplit(".", 1)[-1] for name, module in blocks if isinstance(module, nn.Linear)}
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=160, target_modules=sorted(linear))
    return get_peft_model(model, config)


def make_rows(job: dict[str, Any], tokens: int) -> list[dict[str, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    lines = (Path(job["data"]) / "train.jsonl").read_text().splitlines()
    encoded = [tokenizer.encode(json.loads(line)["text"])[:tokens] for line in lines]
    return [{"input_ids": ids, "labels": ids} for ids in encoded]


def main() -> None:
    request = read_request()
    job = request["job"]
    arguments = TrainingArguments(
        output_dir=request["folder"],
        per_device_train_batch_size=job["batch_size"],
        max_steps=1_000_000,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        bf16=job["precision"] == "bf16",
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = make_rows(job, request["tokens"])
    Trainer(make_model(job), arguments, train_dataset=rows, callbacks=[Turns()]).train()


if __name__ == "__main__":
    main()
