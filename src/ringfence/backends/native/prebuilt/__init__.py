"""Prebuilt native sandboxes: made ahead in a loop of creates or for a pool, bound to a spec when claimed."""
