"""Probes that run inside a sandbox: standard library only, Python 3.8 and newer.

They travel as a zip file, so they import nothing of Ringfence but each other.
"""
