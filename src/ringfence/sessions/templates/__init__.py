"""Templates that clients build: steps in sandboxes, each kept as a snapshot over the one before."""
