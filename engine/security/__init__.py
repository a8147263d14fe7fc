"""Identifiers, paths, sanitised and redacted text, and the audit log."""
