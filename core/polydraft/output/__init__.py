"""What comes out of an engine: what is new as arrays, results with their text, and the deltas that another process gets."""
