"""The HTTP API: routes, their schemas, who may call them. It starts and stops nothing."""
