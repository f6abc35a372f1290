"""Counts, times and health of a manager."""
