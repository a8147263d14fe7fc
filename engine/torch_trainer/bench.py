"""Times the PyTorch trainer on the real group: see engine.training.group_bench."""

from __future__ import annotations

from engine.torch_trainer.main import import_trainer
from engine.training.group_bench import run_bench

if __name__ == "__main__":
    run_bench(lambda process: import_trainer(process.spec.backend).load_training(process))
