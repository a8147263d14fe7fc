"""Nodes over SSH; the only package that imports asyncssh. `connection` opens connections and counts their sessions,
`auth` checks host keys and chooses identities, `channel` is a program on a node, `sftp` its files, and
`transport` combines them.
"""

from engine.cluster.transport.ssh.connection import ConnectionLimiter
from engine.cluster.transport.ssh.transport import SshTransport

__all__ = ["ConnectionLimiter", "SshTransport"]
