"""After transformers' run_clm.py: Trainer with a model made from a configuration; it resumes by itself."""

import os
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Pace(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)


torch.manual_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (256, 16))]
arguments = TrainingArguments(
    "out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=2,
    logging_steps=2,
    save_steps=6,
    save_total_limit=2,
    report_to="none",
    use_cpu=True,
    learning_rate=1e-3,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Pace()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
trainer.save_model()
trainer.save_state()
