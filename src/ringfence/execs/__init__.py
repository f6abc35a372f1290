"""Execs that outlive whoever started them: written down, spooled to disk, found again by id."""
