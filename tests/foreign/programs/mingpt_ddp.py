"""After pytorch/examples distributed/minGPT-ddp: every rank prints its loss, and counts anew in each epoch."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for epoch in range(1, 4):
    for iteration in range(int(sys.argv[1]) // 3):
        loss = (model(torch.randn(4, 8)) - 1).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if iteration % 2 == 0:
            print(f"[RANK{rank}] Epoch {epoch} | Iter {iteration} | Train Loss {loss.item():.5f}", flush=True)
            if rank == 0:
                with open("losses.jsonl", "a") as record:
                    record.write(json.dumps([(epoch - 1) * (int(sys.argv[1]) // 3) + iteration, loss.item()]) + "\n")
dist.destroy_process_group()
