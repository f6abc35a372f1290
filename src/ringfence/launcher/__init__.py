"""The small stdlib-only process that builds sandboxes from a finished plan, and their PID 1."""
