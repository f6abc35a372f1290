"""The bundled attack: escape probes, run against our own sandboxes on this host.

`probes/` runs inside a sandbox, `outside/` needs the host's view, `runner.py` plants what they look
for and judges. Every probe is safe to run even where the isolation fails: it looks for planted
canaries only, its bombs are bounded, and it writes to nothing of the host.
"""
