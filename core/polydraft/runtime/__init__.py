"""Owns the step: scheduling, staging, the runner and its step program, commit and output, for every backend alike.

The engine wires these modules together. Nothing in here knows which device it runs on.
"""
