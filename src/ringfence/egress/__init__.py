"""Network policy enforcement: decided without I/O, enforced by a process beside the host process."""
