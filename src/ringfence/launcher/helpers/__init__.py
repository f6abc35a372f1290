"""Helpers that run inside a sandbox: trees as tar streams, search, watch, layers."""
