"""Instruments: what looks at an engine while it runs, and composes. Trace, record, hazard checker, idle time, allocations.

`Engine(..., instruments=(...))` takes a list of them when it is built. `base` says what an instrument is, which places of a run
it may wrap, and in which order several of them wrap one place. An empty list costs nothing.
"""
