"""How the ranks reach one another: the backend, and each host's addresses and RDMA devices."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

RdmaRow = tuple[str | tuple[str, ...] | None, ...]
"""RDMA device towards each rank, or the devices where there are several cables to each; None for itself and where there
is no cable."""


class LaunchHost(BaseModel):
    """One rank's entry of the hostfile."""

    model_config = ConfigDict(frozen=True)

    ssh: str
    """As OpenSSH takes it (SshTarget.openssh)."""
    ips: tuple[str, ...] = ()
    rdma: RdmaRow | None = None
    """None without RDMA."""


class Wiring(BaseModel):
    """The decision, rank by rank, and why it is so."""

    model_config = ConfigDict(frozen=True)

    backend: str
    """ "ring", "jaccl", "jaccl-ring" or "nccl"."""
    hosts: tuple[LaunchHost, ...]
    infiniband: bool = False
    """Of nccl: every node has an active device."""
    reasons: tuple[str, ...] = ()
    """One sentence each, for people: why this backend, where each address came from."""
    warnings: tuple[str, ...] = ()
    """What was wanted and cannot be, for example RDMA that is off on one node."""
