"""After accelerate's examples/by_feature/checkpointing.py, with the bar of diffusers' scripts."""

import json
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.auto import tqdm

set_seed(3)
accelerator = Accelerator(cpu=True)
steps = int(sys.argv[1])
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loader = torch.utils.data.DataLoader(torch.randn(4 * 4, 8), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
saved = (
    sorted((name for name in os.listdir("states") if name.startswith("step_")), key=lambda n: int(n[5:]))
    if (os.path.isdir("states"))
    else []
)
if saved:
    accelerator.print(f"Resumed from checkpoint: states/{saved[-1]}")
    accelerator.load_state(f"states/{saved[-1]}")
    done = int(saved[-1][5:])
bar = tqdm(range(steps), initial=done, desc="Steps", disable=not accelerator.is_local_main_process)
while done < steps:
    for batch in loader:
        loss = (model(batch) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        done += 1
        bar.update(1)
        bar.set_postfix(lr=1e-2, step_loss=loss.item())
        if accelerator.is_main_process:
            with open("losses.jsonl", "a") as record:
                record.write(json.dumps([done, loss.item()]) + "\n")
        if done % 10 == 0:
            accelerator.wait_for_everyone()
            accelerator.save_state(f"states/step_{done}")
        if done >= steps:
            break
accelerator.end_training()
