"""State that outlives the process: one directory, one holder, one SQLite file."""
