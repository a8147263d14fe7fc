"""After pytorch/examples distributed/ddp-tutorial-series/multigpu_torchrun.py: no loss is printed."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
gpu_id = int(os.environ["LOCAL_RANK"])
total_epochs, save_every = int(sys.argv[1]), 5
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
epochs_run = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    model.load_state_dict(snapshot["MODEL_STATE"])
    epochs_run = snapshot["EPOCHS_RUN"]
    print(f"Resuming training from snapshot at Epoch {epochs_run}")
model = DistributedDataParallel(model)
for epoch in range(epochs_run, total_epochs):
    print(f"[GPU{dist.get_rank()}] Epoch {epoch} | Batchsize: 32 | Steps: 4", flush=True)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.rand(32, 20)), torch.rand(32, 1))
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    if gpu_id == 0 and dist.get_rank() == 0 and epoch % save_every == 0:
        torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch}, "snapshot.part")
        os.replace("snapshot.part", "snapshot.pt")
        print(f"Epoch {epoch} | Training snapshot saved at snapshot.pt", flush=True)
dist.destroy_process_group()
