"""What a step is made of: declarations of modules, the plan that the host sends, the bound programs, what comes back.

Nothing in here knows a model, a sampling rule or a device.
"""
