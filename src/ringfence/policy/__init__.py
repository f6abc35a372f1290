"""Pure judgement: which system calls a program may make, which files it may touch."""
