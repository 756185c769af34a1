"""Stand-ins with upstream's signatures."""
