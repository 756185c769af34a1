"""The published schemas of what commands and reports write."""

from __future__ import annotations

import functools
import json
from importlib import resources

import jsonschema


@functools.cache
def published(name: str) -> jsonschema.Draft202012Validator:
    """The schema of answers that call themselves `name`, e.g. polydraft.generate/1, itself looked at once."""
    file = name.removeprefix("polydraft.").replace("/", "-")
    schema = json.loads(resources.files("polydraft").joinpath("schemas", f"{file}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
