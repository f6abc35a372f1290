"""Access to the API: keys, permissions, the middleware before every route, the audit log."""
