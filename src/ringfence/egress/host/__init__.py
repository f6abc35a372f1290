"""The host's side of the egress process: starting it, policies sent, decisions recorded."""
