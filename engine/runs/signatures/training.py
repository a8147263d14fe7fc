"""What mlx-lm, huggingface_hub and Python's imports print about the job itself."""

from __future__ import annotations

from typing import Final

from engine.runs.signatures.signature import Proof, Signature

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "lora.batch_div",
        r"The batch size must be divisible by the number of workers",
        "the global batch does not divide by the number of ranks",
        "choose a batch_size that does",
        "ValueError: The batch size must be divisible by the number of workers",
        "mlx_lm/tuner/trainer.py",
        Proof.REPRODUCED,
    ),
    Signature(
        "lora.dataset_small",
        r"Dataset must have at least batch_size=(?P<batch>\d+) examples but only has (?P<examples>\d+)",
        "the data set has {examples} examples, fewer than the batch of {batch}",
        "use a smaller batch_size, or more data",
        "ValueError: Dataset must have at least batch_size=32 examples but only has 20.",
        "mlx_lm/tuner/trainer.py",
        Proof.REPRODUCED,
    ),
    Signature(
        "lora.layers",
        r"Requested to train (?P<wanted>\d+) layers but the model only has (?P<layers>\d+) layers",
        "num_layers is {wanted}, and the model has {layers} layers",
        "set num_layers to -1 (all) or at most {layers}; unset it is 16",
        "ValueError: Requested to train 16 layers but the model only has 6 layers.",
        "mlx_lm/lora.py",
        Proof.REPRODUCED,
    ),
    Signature(
        "lora.no_train",
        r"Training set not found or empty",
        "no training data was found on this host",
        "check `data`: it needs a train.jsonl on every node",
        "ValueError: Training set not found or empty. Must provide training set for fine-tuning.",
        "mlx_lm/tuner/datasets.py",
        Proof.REPRODUCED,
    ),
    Signature(
        "hf.offline",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        "the model is not on this host, and runs do not download",
        "copy the model there and name it by its path",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache",
        "huggingface_hub",
        Proof.REPRODUCED,
    ),
    Signature(
        "hf.repoid",
        r"HFValidationError: Repo id must",
        "the model's directory does not exist on this host, so its path was taken for a name on the Hugging Face Hub",
        "copy the model there, or correct `model`",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name'",
        "huggingface_hub",
        Proof.REPRODUCED,
    ),
    Signature(
        "import.mlx",
        r"ModuleNotFoundError: No module named '(?P<module>mlx(?:_lm)?(?:\.[\w.]{0,80})?)'",
        "{module} is not installed in this host's environment: it is another one than on the other hosts",
        "install the same mlx and mlx-lm on every node, from the same lock file",
        "ModuleNotFoundError: No module named 'mlx.core'",
        "Python",
        Proof.ASSUMED,
    ),
    Signature(
        "import.other",
        r"ModuleNotFoundError: No module named '(?P<module>(?!mlx(?:_lm)?['.])[\w.]{1,100})'",
        "the Python module {module} is missing on this host",
        "install it in that node's environment",
        "ModuleNotFoundError: No module named 'datasets'",
        "Python",
        Proof.REPRODUCED,
    ),
)
