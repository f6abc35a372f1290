"""Containers of a Docker-compatible engine on this machine, with an agent inside."""
