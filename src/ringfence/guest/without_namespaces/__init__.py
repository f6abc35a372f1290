"""Parts of the agent for sandboxes without namespaces: files, sockets and shared memory by notification."""
