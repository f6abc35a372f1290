"""Templates over the host's files: read-only directories that a sandbox gets as mounts."""
