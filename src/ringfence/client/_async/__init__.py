"""Written for asyncio and trio; `_sync` is made of it."""
