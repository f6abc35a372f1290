"""Processes as models: the request, the result, the server's view."""
