"""Serves a shape with random weights: `polydraft serve` for timing, of a model that nobody has trained.

    python bench/serve_trace.py --vocab 151680 --server 'K = 3' \\
        'python bench/serve_shape.py bench/shapes/mimo-7b.json work/mimo-7b --port {port} \\
         --engine backend=cuda draft_tokens=3 accept_schedule=[0.8,0.75,0.75]'

The weights are written into a directory once, from where any server may read them; a directory that is there is taken as it is.
`--engine` has fields of `EngineConfig`, as JSON or as text. With `accept_schedule` acceptance is synthetic; texts mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from polydraft.bench.shapes import RandomCheckpoint
from polydraft.conformance.oracle.checkpoints import write_safetensors
from polydraft.conformance.probe import tokenizer_json
from polydraft.serving.main import run
from polydraft.serving.settings import ServerSettings


def write(shape: Path, directory: Path) -> None:
    """The shape's configuration, its weights in bfloat16, a file a tensor, and a tokenizer of one word a token. The configuration
    comes last, so that a directory with one is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    with closing(RandomCheckpoint(shape)) as random, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        names = random.names()
        files = {name: f"model-{number + 1:05}-of-{len(names):05}.safetensors" for number, name in enumerate(names)}

        def put(name: str) -> None:
            write_safetensors(directory / files[name], {name: random.tensor(name)}, "BF16")

        list(pool.map(put, names))
    index = {"metadata": {}, "weight_map": files}
    config = json.loads(shape.read_text(encoding="utf-8"))
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(config["vocab_size"])), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0, **config}), encoding="utf-8")


def field(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value as JSON where it is JSON."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"got {text}, wanted FIELD=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def ready(url: str, chosen: Mapping[str, str]) -> None:
    """Say where it listens."""
    print(f"serving at {url}", *(f"{name}: {why}" for name, why in chosen.items()), sep="\n", flush=True)


def main() -> int:
    """Write what is missing, and serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="file of bench/shapes")
    parser.add_argument("directory", type=Path, help="where the weights are, or are written")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-requests", type=int, default=1024)
    parser.add_argument("--engine", type=field, nargs="*", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    if not (options.directory / "config.json").exists():
        write(options.shape, options.directory)
    settings = ServerSettings(port=options.port, max_requests=options.max_requests, queue_s=3600.0)
    return run({"model": str(options.directory), "logprobs": 20, **dict(options.engine)}, settings, ready=ready)


if __name__ == "__main__":
    raise SystemExit(main())
