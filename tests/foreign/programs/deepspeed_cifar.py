"""After DeepSpeedExamples training/cifar/cifar10_deepspeed.py: the engine's step and checkpoints."""

import argparse
import json
import os
import time

import deepspeed
import torch

# It would first be compiled, for minutes, and is for ranks of one machine.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
parser = argparse.ArgumentParser()
parser.add_argument("-e", "--epochs", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed("gloo")
torch.manual_seed(5)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
engine, _, _, _ = deepspeed.initialize(
    args=args,
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), 1e-3),
    config={"train_batch_size": 8, "steps_per_print": 10, "zero_allow_untested_optimizer": True},
)
batches, first = 20, 0
if os.path.exists("saved/latest"):
    first = engine.load_checkpoint("saved")[1]["epoch"]
    print(f"resumed at epoch {first + 1}")
for epoch in range(first, args.epochs):
    running = 0.0
    for i in range(batches):
        inputs, labels = torch.randn(4, 3, 4, 4), torch.randint(10, (4,))
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        time.sleep(0.05)
        running += loss.item()
        if i % 5 == 4:
            if deepspeed.comm.get_rank() == 0:
                print(f"[{epoch + 1: d}, {i + 1: 5d}] loss: {running / 5: .3f}", flush=True)
                with open("losses.jsonl", "a") as record:
                    record.write(json.dumps([epoch * batches + i + 1, running / 5]) + "\n")
            running = 0.0
    engine.save_checkpoint("saved", client_state={"epoch": epoch + 1})
print("Finished Training")
