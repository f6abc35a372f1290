"""What a newcomer meets first."""
