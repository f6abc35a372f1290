"""Branches of a sandbox: copies of it, a race between them, and a three-way merge of their files."""
