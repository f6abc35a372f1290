"""Backends whose guest runs in a jail: a program with isolation of its own."""
