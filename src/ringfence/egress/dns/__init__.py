"""Names: questions read and answered, synthetic addresses, resolving on the host."""
