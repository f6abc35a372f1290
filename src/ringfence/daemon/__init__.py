"""`ringfence serve`: one process that holds the state directory and serves the API."""
