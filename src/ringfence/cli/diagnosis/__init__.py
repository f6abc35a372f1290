"""Commands that tell what this machine can do: `doctor`, `doctor --attack`, `bench`."""
