"""Building blocks of backends on this machine: host facts, host ids, cgroups, the template, protected paths."""
