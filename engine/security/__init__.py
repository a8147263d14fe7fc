"""What stands between text from outside and the rest: identifiers, paths, sanitised output, redaction, the audit log.
Everything here is a pure function or writes the audit log alone; nothing here knows of runs, nodes or configuration."""
