"""Made of `_async` by `tools/make_sync_client.py`, but for `pauses`."""
