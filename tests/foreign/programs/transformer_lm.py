"""After ml-explore/mlx-examples transformer_lm/main.py, data-parallel as MLX's documentation says; it resumes."""

import json
import os
import sys
import time

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten

group = mx.distributed.init()
mx.random.seed(group.rank())
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
optimizer = optim.AdamW(learning_rate=1e-2)
first = 0
if os.path.exists("weights.npz"):
    weights = dict(mx.load("weights.npz"))
    first = int(weights.pop("iteration").item())
    model.load_weights(list(weights.items()))
    print(f"Resuming after iteration {first}", flush=True)


def loss_fn(model, ids):
    return nn.losses.cross_entropy(model(ids), (ids + 1) % 32, reduction="mean")


step = nn.value_and_grad(model, loss_fn)
for it in range(first, int(sys.argv[1])):
    begun = time.perf_counter()
    loss, grads = step(model, mx.random.randint(0, 32, (4, 8)))
    optimizer.update(model, nn.average_gradients(grads))
    mx.eval(loss, model.parameters(), optimizer.state)
    time.sleep(0.05)
    if group.rank() == 0:
        rate = 1 / (time.perf_counter() - begun)
        print(f"Iter {it + 1}: Train loss {loss.item():.3f}, It/sec {rate:.3f}", flush=True)
        with open("losses.jsonl", "a") as record:
            record.write(json.dumps([it + 1, loss.item()]) + "\n")
        if (it + 1) % 5 == 0:
            mx.savez("part.npz", **dict(tree_flatten(model.parameters())), iteration=mx.array(it + 1))
            os.replace("part.npz", "weights.npz")
