"""FUSE file servers: host files shown to a machine's kernel, or to one tenant's sandboxes."""
