"""Counts the tokens of text files, for `--draft-vocab`: which tokens an MTP head had better be able to draft.

python tools/count_tokens.py src/**/*.py --model DIR --out counts.json
polydraft generate "def f(" --model DIR --draft-vocab counts.json:8192
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from polydraft.demo import demo_model_path
from polydraft.models.tokenizer import Tokenizer


def count(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """How often each token occurs, the most frequent first."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text))
    return {str(token): number for token, number in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="text in UTF-8")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="whose tokenizer.json; default: the demo model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    counts = count(Tokenizer.from_dir(args.model), (file.read_text(encoding="utf-8", errors="replace") for file in args.files))
    args.out.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    print(f"{sum(counts.values()):,} tokens, {len(counts):,} different ones", file=sys.stderr)


if __name__ == "__main__":
    main()
