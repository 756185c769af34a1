"""Every contract in portable Paddle operations: state, numeric, sampling, processing and rejection kernels.

`table.py` collects them. No kernel here asks which device it runs on.
"""
