"""Streams over HTTP and WebSocket: output, attachments, previews, uploads."""
