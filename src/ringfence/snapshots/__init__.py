"""Saved file systems: a catalogue on disk, whole or not there at all."""
