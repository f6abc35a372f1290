"""The small stdlib-only process that builds sandboxes from a finished plan, and their PID 1.

What boots on the way of every start imports the C halves of the library where these are enough
(`posix`, `_struct`, `_signal`, `_socket`, ...): `os` alone takes a fifth of all the importing here.
"""
