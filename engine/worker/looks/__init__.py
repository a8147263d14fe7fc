"""What preflight looks at on a node: each module runs there as `python -m worker.looks.<name>`, with the node's own
python and the standard library, and prints one JSON object. Faults and fixes are the node's words; verdicts are not."""
