"""What limits of thinking cost the host of a step, as `host_turns.py` measures it; compared with engines that know nothing of
thinking.

    python bench/thinking_cost.py --page docs/serving.md
    python bench/thinking_cost.py --read bench/results/thinking_cost.json --page docs/serving.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from bench import host_turns
from bench.host_turns import Wish

FIGURES = "bench/results/thinking_cost.json"
AROUND = {"think_start_ids": (7,), "think_end_ids": (11,), "think_forced_ids": (9, 11)}
LIMITS = {"thinking_limit": 900, "reply_budget": 800, "reply_start_token_ids": (3, 4), "stop_token_ids": (2,)}
WISHES = {
    "nothing": Wish({}, {}),
    "nothing, of an engine that knows thinking": Wish(AROUND, {}),
    "limits of thinking and reply": Wish(AROUND, LIMITS),
    "a penalty": Wish({}, {"presence_penalty": 0.5}),
    "nothing, of an engine that takes grammars": Wish({"constraints": True}, {}),
}


def rows(turns: int) -> list[dict[str, Any]]:
    """A row a wish."""
    return host_turns.measure("limits of thinking", WISHES, "nothing", turns)[0]


def markdown(found: list[dict[str, Any]]) -> str:
    """A line a wish."""
    return host_turns.markdown(found)


if __name__ == "__main__":
    host_turns.main(__doc__ or "", FIGURES, rows, markdown)
