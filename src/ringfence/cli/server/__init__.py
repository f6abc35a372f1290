"""Commands that speak to a server."""
