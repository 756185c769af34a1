"""A second opinion on the whole model: naive NumPy recomputation without caches, batches or any code of the runtime.

`model.py` computes target and MTP logits from the equations, `rounds.py` replays greedy speculative decoding with it.
"""

from tests.oracle.model import OracleModel
from tests.oracle.rounds import GreedyRounds, greedy_rounds

__all__ = ["GreedyRounds", "OracleModel", "greedy_rounds"]
