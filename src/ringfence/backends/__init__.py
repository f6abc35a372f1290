"""Isolation backends: one contract, several implementations. Only `registry` names a concrete one."""
