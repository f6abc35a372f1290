"""Sandboxes without namespaces, for hosts that refuse them: Landlock, filters and a guardian."""
