"""After Lightning's boring_model.py and its page on checkpoints: a LightningModule with a bar, resumed by ckpt_path."""

import json
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar


class Boring(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            with Path("losses.jsonl").open("a") as record:
                record.write(json.dumps([self.trainer.global_step, outputs["loss"].item()]) + "\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


steps = int(sys.argv[1])
L.seed_everything(1)
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy="ddp",
    max_steps=steps,
    max_epochs=100,
    logger=False,
    callbacks=[TQDMProgressBar(), ModelCheckpoint("ckpts", every_n_train_steps=5, save_last=True)],
)
last = Path("ckpts/last.ckpt")
loader = torch.utils.data.DataLoader(torch.randn(40, 32), batch_size=2)
trainer.fit(Boring(), loader, ckpt_path=str(last) if last.exists() else None)
