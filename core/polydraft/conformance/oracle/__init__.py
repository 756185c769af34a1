"""A second opinion on the whole model: naive NumPy recomputation without caches, batches or any code of the runtime.

`model.py` computes target and MTP logits from the equations, `rounds.py` and `coupled.py` replay speculative decoding with it,
`checkpoints.py` writes random checkpoints. Level L5 of the kit and the tests of the project compare engines with it.
"""

from polydraft.conformance.oracle.model import OracleModel
from polydraft.conformance.oracle.rounds import GreedyRounds, greedy_rounds, greedy_text

__all__ = ["GreedyRounds", "OracleModel", "greedy_rounds", "greedy_text"]
