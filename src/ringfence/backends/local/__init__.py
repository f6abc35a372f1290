"""What backends of this machine are made of: its facts, host ids, cgroups, the template, protected paths."""
