"""The file form of a recording: Chrome trace JSON, which Perfetto and chrome://tracing open, and its way back.

`generate --trace` writes it, `polydraft trace` reads it. It holds exactly what was recorded: no figure is computed here.

A launch of a step says how many rows it verified for a slot at most and how many drafts it made (`StepWidth`).

One process is the host, one the device, and a thread is a lane. Every span is a complete event ("X"); a launch and its
execution share a flow ("s" on the host, "f" on the device). Times in a file are microseconds since its first span.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polydraft import json_text
from polydraft.errors import ConfigError
from polydraft.instruments.output_file import writing
from polydraft.instruments.timeline import DEVICE, HOST, Recording, Span
from polydraft.program.plan import StepWidth

SCHEMA = "polydraft.timeline/1"


def write(path: str | Path, recording: Recording) -> None:
    """Write `recording`. Raises `ConfigError` where the file cannot be written."""
    other = {"schema": SCHEMA, "device_times": recording.device_times, **recording.about}
    document = {"traceEvents": _events(recording), "displayTimeUnit": "ms", "otherData": other}
    with writing(path):
        Path(path).write_text(json.dumps(document), encoding="utf-8")


def _events(recording: Recording) -> list[dict[str, Any]]:
    spans = recording.spans
    origin = min((s.start_s for s in spans), default=0.0)
    lanes = {key: number for number, key in enumerate(dict.fromkeys((s.side, s.lane) for s in spans))}
    sides = {HOST: "host", DEVICE: f"device ({recording.device_times})"}
    events: list[dict[str, Any]] = [_named("process_name", side, 0, name) for side, name in sides.items()]
    events += [{"ph": "M", "pid": side, "name": "process_sort_index", "args": {"sort_index": side}} for side in sides]
    events += [_named("thread_name", side, number, lane) for (side, lane), number in lanes.items()]
    for span in spans:
        place = {"pid": span.side, "tid": lanes[span.side, span.lane], "ts": 1e6 * (span.start_s - origin)}
        args: dict[str, Any] = {"step": span.step, "kind": span.kind, "stage": span.stage, "rows": span.rows, "flows": span.flows}
        if (span.kind, span.name) == ("stage", "launch") and span.step in recording.widths:
            args |= recording.widths[span.step]._asdict()
        category = span.stage or span.kind
        events.append({"ph": "X", **place, "dur": 1e6 * span.seconds, "name": span.name, "cat": category, "args": args})
        ends = {"ph": "s"} if span.side == HOST else {"ph": "f", "bp": "e"}
        events += [{**ends, **place, "name": "launch", "cat": "launch", "id": flow} for flow in span.flows]
    return events


def _named(what: str, side: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": side, "tid": lane, "name": what, "args": {"name": name}}


def read(path: str | Path) -> Recording:
    """Read a file that `write` wrote; times are seconds since its first span. Raises `ConfigError` for anything else."""
    fix = "make one with polydraft generate --trace FILE"
    document = json_text.read(Path(path), dict, fix)
    try:
        return _recording(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no timeline of polydraft ({type(error).__name__}: {error}), wanted a file of schema {SCHEMA}; {fix}"
        ) from error


def _recording(document: dict[str, Any]) -> Recording:
    about = dict(document["otherData"])
    if about.pop("schema") != SCHEMA:
        raise ValueError(f"another schema than {SCHEMA}")
    events = document["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = tuple(_span(e, lanes[e["pid"], e["tid"]]) for e in events if e["ph"] == "X")
    launches = [e["args"] for e in events if e["ph"] == "X" and "window" in e["args"]]
    widths = {args["step"]: StepWidth(args["window"], args["num_drafts"]) for args in launches}
    return Recording(spans, about.pop("device_times"), about, widths)


def _span(event: dict[str, Any], lane: str) -> Span:
    args, start = event["args"], 1e-6 * event["ts"]
    return Span(
        event["pid"], lane, args["kind"], event["name"], start, start + 1e-6 * event["dur"], args["step"], args["stage"],
        args["rows"], tuple(args["flows"]),
    )  # fmt: skip
