"""Framing of many channels over one byte stream, and the relay of a machine's connections."""
