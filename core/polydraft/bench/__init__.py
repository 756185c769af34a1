"""The benchmark behind `polydraft bench`: engines of a given shape, timed runs on them, and the results as they are committed.

The command and the scripts in `bench/` use it. It runs the same engine that serves requests, and changes nothing in it.
"""
