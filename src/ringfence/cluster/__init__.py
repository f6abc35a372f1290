"""Many machines: where sandboxes are placed, each node's daemon, and the gateway in front of them.

Ray does membership, health and restarts. `placement` needs no Ray.
"""
