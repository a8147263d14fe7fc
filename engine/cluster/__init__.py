"""The nodes as the head sees them: transports (local, SSH), agents, facts, telemetry, topology, staged bundles."""
