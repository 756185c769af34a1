"""Ranks: one model over several devices of a host. Where ranks meet (`exchange.py`), and collectives of devices whose memory is
the host's (`kernels.py`).

A rank is one of N engines that run the same steps over their shares of one model. The engine of rank 0 plans; this package knows
neither engines nor plans.
"""

from polydraft.ranks.exchange import Exchange, Group, Note

__all__ = ["Exchange", "Group", "Note"]
