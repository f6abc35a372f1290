"""Sandboxes and sessions by id, client and key: those alive, and records of those that ended."""
