"""PID 1 of a native sandbox: starts processes, reaps them, and answers for what the filter asks."""
