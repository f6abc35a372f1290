"""E2B's API over the same sandboxes, as its own SDKs speak it: `ringfence serve --e2b`."""
