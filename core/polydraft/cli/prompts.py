"""Reads prompts for the command line: one text, or a file with one JSON object per line.

`polydraft generate` calls it before anything heavy is loaded, so that a typo in line 900 is reported at once. It runs nothing and
drops no line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from polydraft import json_text
from polydraft.errors import ConfigError, RequestError
from polydraft.sampling_params import SamplingParams

OWN_KEYS = ("prompt", "prompt_ids", "id")
"""Keys of a line besides the sampling parameters."""


@dataclass(frozen=True)
class Job:
    """One request to be made: a text or token ids, its parameters, and where it was read, for errors."""

    prompt: str | list[Any]
    params: SamplingParams
    id: str | None = None
    where: str = ""


def read_jobs(file: str, defaults: Mapping[str, Any]) -> list[Job]:
    """Read FILE.jsonl (`-`: standard input); each line overrides `defaults`. Raises `ConfigError` for a file that cannot be
    read or has no request, `RequestError` naming file and line for a line that is wrong."""
    name = "standard input" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--prompts {file} cannot be read: {error.strerror}; give a file with one JSON object a line"
        ) from error
    jobs = [_job(line, f"{name} line {number}", defaults) for number, line in _lines(data)]
    if not jobs:
        raise ConfigError(f'{name} has no requests, wanted one JSON object a line, such as {{"prompt": "def f(x):"}}; add some')
    _refuse_repeated_ids(jobs)
    return jobs


def read_text() -> str:
    """The prompt on standard input, for the prompt `-`. Raises `RequestError` where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is no UTF-8 text: {error}; convert it to UTF-8") from error


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of every line that is not blank."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    return ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())


def _job(line: bytes, where: str, defaults: Mapping[str, Any]) -> Job:
    entry = json_text.checked(line, dict, where, "write one JSON object a line, {...}, in UTF-8", error=RequestError)
    _refuse_unknown_keys(entry, where)
    own = {key: value for key, value in entry.items() if key not in OWN_KEYS}
    try:
        return Job(_prompt(entry), SamplingParams.from_mapping({**defaults, **own}), _id(entry), where)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def _refuse_unknown_keys(entry: Iterable[str], where: str) -> None:
    known = [*OWN_KEYS, *(f.name for f in fields(SamplingParams))]
    for key in entry:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RequestError(f"{where}: unknown key {key!r}; {hint}known: {', '.join(known)}")


def _prompt(entry: Mapping[str, Any]) -> str | list[Any]:
    if ("prompt" in entry) == ("prompt_ids" in entry):
        raise RequestError("wanted either 'prompt' or 'prompt_ids'; give exactly one of them")
    key, kind = ("prompt", str) if "prompt" in entry else ("prompt_ids", list)
    prompt = entry[key]
    if not isinstance(prompt, kind):
        wanted = "a text" if kind is str else "a list of token ids"
        raise RequestError(f"{key} is {json.dumps(prompt)[:40]}, wanted {wanted}; correct it")
    return prompt


def _id(entry: Mapping[str, Any]) -> str | None:
    request_id = entry.get("id")
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise RequestError(f"id is {json.dumps(request_id)[:40]}, wanted a text that is not empty; correct it or leave it out")
    return request_id


def _refuse_repeated_ids(jobs: Iterable[Job]) -> None:
    first: dict[str, str] = {}
    for job in jobs:
        if job.id is None:
            continue
        if job.id in first:
            raise RequestError(f"{job.where}: id {job.id!r} is used by {first[job.id]} already; choose another")
        first[job.id] = job.where
