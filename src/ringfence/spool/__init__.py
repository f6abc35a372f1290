"""Output of execs on disk: bounded, numbered by byte, readable from any place, true after a crash.

`Spool` is one exec's; it has a `Track` for each stream and an `Order` between them. What is on disk
is only what the names and the lengths of files say, so that there is no index to be out of step.
"""
