"""HTTP/1.1 between a sandbox and a server: read strictly, judged, written anew."""
