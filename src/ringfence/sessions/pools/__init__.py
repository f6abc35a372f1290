"""Pools of warm sandboxes."""
