"""Owns `polydraft bench`: engines of a given shape, timed runs on them, and the committed form of what they took.

The command and the scripts in `bench/` use it. It runs the very engine that serves requests, and changes nothing in it.
"""
