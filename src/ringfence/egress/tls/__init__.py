"""TLS: the first message read strictly, termination, and the authorities trusted."""
