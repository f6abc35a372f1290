"""The `ringfence` command. `run` is on the way of every start: it imports as little as it can."""
