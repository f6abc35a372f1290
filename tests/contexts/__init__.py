"""Contexts: cells that share their variables, on every backend and over a server."""
