"""Backends with an agent of ours inside: execs, files, limits and facts, asked of the agent."""
