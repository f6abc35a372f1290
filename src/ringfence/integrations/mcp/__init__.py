"""An MCP server whose tools work in a sandbox: `ringfence mcp`.

Needs the extra `mcp` (the official SDK, 2.x).
"""
