"""The event loop of the egress process, byte streams, and relaying between them."""
