"""The PyTorch trainer: DDP, FSDP and DeepSpeed; its checkpoints, and the programs that measure and check it."""
