"""Copies of running processes, made in new sandboxes by a template of their memory. x86-64, Linux 6.7."""
