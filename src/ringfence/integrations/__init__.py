"""Adapters: the interfaces by which agent frameworks know a sandbox, each over the library.

Every adapter takes the keyword arguments of `Sandbox.create`, or `make`, or `server`: see `Origin`. A
framework is imported only by the adapter of its name, so that none of them is a dependency.
"""
