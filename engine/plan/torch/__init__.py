"""The plan of PyTorch jobs. It imports no torch and contacts no node."""
