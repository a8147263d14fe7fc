"""After pytorch/tutorials beginner_source/basics/quickstart_tutorial.py, with DDP: no name stands before its steps."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(28, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
size = int(sys.argv[1])
for batch in range(1, size + 1):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 28)), torch.randint(10, (8,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if batch % 2 == 0 and dist.get_rank() == 0:
        print(f"loss: {loss.item():>7f}  [{batch:>5d}/{size:>5d}]", flush=True)
        with open("losses.jsonl", "a") as record:
            record.write(json.dumps([batch, loss.item()]) + "\n")
dist.destroy_process_group()
