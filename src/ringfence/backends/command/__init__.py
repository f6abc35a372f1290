"""Any outer launcher, given as an argv template: `bwrap`, the Codex CLI, your own."""
