"""The measures, each one function from settings to rows."""
