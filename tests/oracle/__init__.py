"""A second opinion on the whole model: naive NumPy recomputation without caches, batches or any code of the runtime.

`model.py` computes target and MTP logits from the equations, `rounds.py` replays greedy speculative decoding with it,
`tiny.py` writes random checkpoints, `prompts.py` holds the test prompts for the demo model.
"""

from tests.oracle.model import OracleModel
from tests.oracle.prompts import CODE_PROMPTS, STOPPING_PROMPT
from tests.oracle.rounds import GreedyRounds, greedy_rounds

__all__ = ["CODE_PROMPTS", "GreedyRounds", "STOPPING_PROMPT", "OracleModel", "greedy_rounds"]
