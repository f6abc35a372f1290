"""Other sandboxes, where this machine has them. Nothing is installed; all is cleaned up."""
