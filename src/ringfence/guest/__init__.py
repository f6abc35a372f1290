"""Code that runs inside a guest whose PID 1 is not the launcher's; standard library only, sent by
the host.

The agent speaks the launcher's protocol over whatever channel the guest gets. It is privileged
inside and nothing outside: a guest that takes it over has gained the sandbox it is in, and its host
trusts nothing from it but how execs ended.
"""
