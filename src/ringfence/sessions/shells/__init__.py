"""Persistent shells and the bash tool for agents."""
