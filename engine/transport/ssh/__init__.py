"""A node over SSH; the only package that knows asyncssh. `dial` makes one connection, `line` counts its sessions,
`channel` is a program on it, `files` is SFTP, and `transport` puts them together.
Nothing here knows what is run; nothing outside imports more than these names."""

from engine.transport.ssh.dial import Doors
from engine.transport.ssh.transport import SshTransport

__all__ = ["Doors", "SshTransport"]
