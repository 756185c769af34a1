"""The demo model: a trained MTP checkpoint of 18.6 MB that is part of every installation, and how to find it.

The files are below `mimo-tiny-python/`. The command line and `LLM` call this module when no model is named; tests do, too.
Weights are read by `polydraft.models`.
"""

from importlib.resources import files
from pathlib import Path

from polydraft.errors import CheckpointError

__all__ = ["demo_model_path"]

_NAME = "mimo-tiny-python"


def demo_model_path() -> Path:
    """Return the directory of the demo checkpoint.

    The directory holds `config.json`, two safetensors shards with `model.safetensors.index.json`, `tokenizer.json` and
    `MODEL_CARD.md`. It is read-only to polydraft and stays where the package was installed. Host only; nothing is
    opened, extracted or synchronised.

    Errors: `CheckpointError` where the package does not lie in a plain directory (a zip archive has no files to open)
    or where the installation left the model out.
    """
    directory = files(__name__) / _NAME
    if not isinstance(directory, Path):
        raise CheckpointError(
            f"the demo model must be read from a directory, got {directory} inside an archive, "
            f"wanted an unpacked installation; install polydraft with pip or pass --model DIR"
        )
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"the demo model is not installed, got no config.json in {directory}, wanted the complete wheel; "
            f"reinstall polydraft or pass --model DIR"
        )
    return directory
