"""The weights of a run as other programs and the Hugging Face Hub take them, with a model card."""
