"""The test prompts for the demo model, beside the recomputing oracle, which the conformance kit ships.

`prompts.py` holds the prompts; `polydraft.conformance.oracle` computes target and MTP logits from the equations and replays
speculative decoding with them.
"""

from polydraft.conformance.oracle import GreedyRounds, OracleModel, greedy_rounds
from tests.oracle.prompts import CODE_PROMPTS, STOPPING_PROMPT

__all__ = ["CODE_PROMPTS", "GreedyRounds", "STOPPING_PROMPT", "OracleModel", "greedy_rounds"]
