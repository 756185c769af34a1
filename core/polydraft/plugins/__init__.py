"""Plugins of an engine: found, loaded, checked and asked through one pluggy manager; kernel tables, kernel packs, variants."""
