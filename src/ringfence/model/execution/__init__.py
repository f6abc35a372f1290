"""The execution service as models."""
