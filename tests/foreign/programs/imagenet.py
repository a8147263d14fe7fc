"""After pytorch/examples imagenet/main.py: meters in brackets, a checkpoint after each epoch, `--resume`."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume", default="")
parser.add_argument("-p", "--print-freq", type=int, default=2)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(12, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
start, batches = 0, 20
if args.resume and os.path.isfile(args.resume):
    checkpoint = torch.load(args.resume)
    start = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    print(f"=> loaded checkpoint '{args.resume}' (epoch {start})")
for epoch in range(start, args.epochs):
    total = 0.0
    for i in range(batches):
        begun = time.time()
        images, target = torch.randn(8, 12), torch.randint(10, (8,))
        output = model(images)
        loss = torch.nn.functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.03)
        total += loss.item()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            took, right = time.time() - begun, (output.argmax(1) == target).float().mean() * 100
            meters = [f"Time {took:6.3f} ({took:6.3f})", "Data  0.000 ( 0.000)"]
            meters += [f"Loss {loss.item():.4e} ({total / (i + 1):.4e})", f"Acc@1 {right:6.2f} ({right:6.2f})"]
            print("\t".join([f"Epoch: [{epoch}][{i + 1:2d}/{batches}]", *meters]), flush=True)
            with open("losses.jsonl", "a") as record:
                record.write(json.dumps([epoch * batches + i + 1, loss.item()]) + "\n")
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, "checkpoint.part")
        os.replace("checkpoint.part", "checkpoint.pth.tar")
dist.destroy_process_group()
