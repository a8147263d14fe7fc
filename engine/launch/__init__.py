"""Starts an attempt: hostfile and ports, start.sh and its environment, mlx.launch with our ssh, or without it."""
