"""What a sandbox may reach: decided without I/O, enforced by one process beside the host process."""
