"""Kernel calls only: one small typed function per call, one file per facility. Stdlib only."""
