"""After karpathy/nanoGPT train.py: an endless loop, a checkpoint at each evaluation, and resuming."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=40)
parser.add_argument("--eval_interval", type=int, default=10)
config = parser.parse_args()
dist.init_process_group("gloo")
master = dist.get_rank() == 0
torch.manual_seed(1337 + dist.get_rank())
model = torch.nn.Sequential(torch.nn.Embedding(65, 16), torch.nn.Linear(16, 65))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
iter_num = 0
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
raw_model, model = model, DistributedDataParallel(model)


def batch_loss():
    ids = torch.randint(65, (8, 16))
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), (ids.flatten() + 1) % 65)


while True:
    t0 = time.time()
    if iter_num % config.eval_interval == 0 and master and iter_num > 0:
        with torch.no_grad():
            print(f"step {iter_num}: train loss {batch_loss():.4f}, val loss {batch_loss():.4f}")
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state, "ckpt.part")
        os.replace("ckpt.part", "ckpt.pt")
        print("saving checkpoint to .")
    loss = batch_loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.05)
    if master:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - t0) * 1000:.2f}ms, mfu 0.00%", flush=True)
        with open("losses.jsonl", "a") as record:
            record.write(json.dumps([iter_num, loss.item()]) + "\n")
    iter_num += 1
    if iter_num > config.max_iters:
        break
dist.destroy_process_group()
