"""A report for people and CI systems: one page of text, and JUnit XML.

Both are made from the report alone, without further judgement.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args
from xml.sax.saxutils import escape, quoteattr

from polydraft.conformance.outcomes import LEVELS, OUTCOMES, Ownership, Result
from polydraft.conformance.verdict import not_seen
from polydraft.contracts import REGISTRY
from polydraft.contracts.compare import share

if TYPE_CHECKING:
    from polydraft.conformance.report import Report

SKIPPED: Final = ("unsupported", "unseen", "waived")
"""Outcomes that neither pass nor fail, as JUnit calls them."""
MOST_PROBLEMS, MOST_OF_ONE = 12, 3
"""Problems that the page shows, in all and of one kernel or kind of check; report.json has every one."""
WHOLE: Final = "--out FOLDER writes all of them into report.json"

_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may have."""


def page(report: Report) -> str:
    """One page: who, the verdict, a row a level, problems, headroom a kernel, what was not claimed."""
    content = report.content
    backend, verdict = content["backend"], content["verdict"]
    kit, device = content["kit"], backend["device"] or "its default"
    device += f" ({backend['device_reason']})" if backend.get("device_reason") else ""
    lines = [
        f"{backend['name']} {backend['version']} ({backend['package']}, digest {backend['digest']}) on {device}",
        f"evidence: {claim_of(backend)}; kit {kit['version']}, lists {kit['lists']}, {content['seconds']:.1f} s",
        "",
        level_head(),
    ]
    for level, title in LEVELS.items():
        mine = [r for r in report.results if r.level == level]
        if mine:
            numbers = "".join(f"{sum(r.outcome == outcome for r in mine):>12}" for outcome in OUTCOMES)
            compared, seconds = sum(r.comparisons for r in mine), sum(r.seconds for r in mine)
            lines.append(f"{level} {title:<9}{numbers}{compared:>14,}{seconds:>9.1f}")
    lines += ["", *_features(content)] if verdict["features"] else []
    lines += _kernels(content.get("kernels") or {}, report.results)
    used = _headroom(report.results)
    lines += ["", *used] if used else []
    lines += _surprises(report)
    near = sum(result.near_ties for result in report.results)
    lines += ["", f"tolerated near-ties: {near} (texts that differ behind a choice closer than their dtype can tell)"]
    if content.get("off_device", {}).get("asked"):
        left = content["off_device"]
        count = len({operation for operations in left["operations"].values() for operation in operations}) or "none"
        found = f"not known: {left['problem']}" if left["problem"] else count
        lines += ["", f"operations that leave the device for the CPU: {found}"]
    if unseen := not_seen(report.results):
        why = {r.message.partition(": ")[0]: r.message for r in report.results if r.outcome == "unseen"}
        lines += ["", "declared, and not seen from outside of the backend:"]
        lines += [f"  {why[what]} ({ids[0]}{f' and {len(ids) - 1} more' if ids[1:] else ''})" for what, ids in unseen.items()]
    if content["not_claimed"]:
        lines += ["", f"capabilities not declared: {', '.join(content['not_claimed'])}"]
    if verdict["problems"]:
        problems = _told_once(verdict["problems"])
        rest = len(problems) - MOST_PROBLEMS
        lines += ["", *(f"- {problem}" for problem in problems[:MOST_PROBLEMS])]
        lines += [f"- and {rest} more; {WHOLE}"] if rest > 0 else []
    lines += ["", verdict["sentence"], "self-certified: this is its author's evidence; run it again with"]
    lines += [f"  {' '.join(content['command']) or _command(content)}"]
    return "\n".join(lines) + "\n"


def _command(content: Mapping[str, Any]) -> str:
    """What makes such a report, where nobody typed a command."""
    device = f" --device {content['backend']['device']}" if content["backend"]["device"] else ""
    features = "".join(f" --feature {name}" for name in content["claim"]["features"])
    return f"polydraft conform {content['backend']['name']}{device} --profile {content['claim']['profile']}{features}"


def _told_once(problems: Sequence[str]) -> list[str]:
    """Problems, with checks that failed with the same sentence in one line; the first one tells how to see it again."""
    same: dict[str, list[str]] = {}
    for problem in problems:
        id_, _, sentence = problem.partition(": ")
        same.setdefault(sentence.partition(" (rerun: ")[0] or id_, []).append(problem)
    lines, shown = [], Counter[str]()
    for found in same.values():
        id_, colon, sentence = found[0].partition(": ")
        subject = "/".join(id_.split("/")[:2])  # one kernel, or one kind of check
        shown[subject] += 1
        if shown[subject] <= MOST_OF_ONE:
            lines.append(f"{id_}{f' and {len(found) - 1} more' if len(found) > 1 else ''}{colon}{sentence}")
    rest = {subject: number - MOST_OF_ONE for subject, number in shown.items() if number > MOST_OF_ONE}
    return lines + [f"and {number} more kinds of failure of {subject}; {WHOLE}" for subject, number in rest.items()]


def claim_of(backend: Mapping[str, Any]) -> str:
    """The evidence class of a backend with what it rests on."""
    return f"{backend['evidence']} ({backend['evidence_on']})" if backend.get("evidence_on") else str(backend["evidence"])


def level_head() -> str:
    """Head of the table of levels."""
    return f"{'level':<12}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES) + f"{'compared':>14}{'seconds':>9}"


def _features(content: Mapping[str, Any]) -> list[str]:
    """How the claim stands to each feature, and what it lacks of those of which a part is there."""
    lines = [f"{'feature':<12}{'claim':<12}kernels"]
    for name, one in content["verdict"]["features"].items():
        owners = [content["owners"].get(contract.name) for contract in REGISTRY.of([name])]
        many = [f"{owners.count(owner)} {owner}" for owner in get_args(Ownership) if owner in owners]
        lacking = f"lacking {', '.join(one['lacking'])}" if one["lacking"] and one["state"] != "absent" else ""
        lines.append(f"{name:<12}{one['state']:<12}{'; '.join(filter(None, (', '.join(many), lacking)))}".rstrip())
    return lines


def _kernels(kernels: Mapping[str, Any], results: Sequence[Result]) -> list[str]:
    """What came of each kernel of the packs that were named, and what these leave to the backend."""
    lines: list[str] = []
    packs = dict.fromkeys(one["pack"] for one in (*kernels.get("overrides", ()), *kernels.get("left_out", ())))
    for pack in packs:
        said = kernels["packs"].get(pack, {"evidence": "", "library": ""})
        library = f" ({said['library']})" if said["library"] else ""
        lines += ["", f"kernels of {pack}{library}{', seen by its authors on ' * bool(said['evidence'])}{said['evidence']}:"]
        for one in (one for one in kernels["overrides"] if one["pack"] == pack):
            outcomes = Counter(result.outcome for result in results if result.kernel == one["contract"])
            failed, held = outcomes["fail"] + outcomes["error"], outcomes["pass"]
            came = f"fails in {failed} of {failed + held} checks" if failed else f"holds in {held} checks" if held else "not run"
            lines.append(f"  {one['contract']:<24}{came:<28}{one['computed_by']}".rstrip())
        lines += [f"  {one['contract']:<24}{'left out':<28}{one['reason']}" for one in kernels["left_out"] if one["pack"] == pack]
    return lines


def _surprises(report: Report) -> list[str]:
    """How much of what was asked of kernels was on no list."""
    cases = sum(result.cases for result in report.results)
    drawn = sum(result.cases for result in report.results if result.id.endswith("surprises"))
    if not drawn:
        return []
    share = f"{drawn:,} of {cases:,} cases of kernels, {drawn / cases:.0%}"
    return ["", f"surprises: {share}, are on no list; --seed {report.content['claim']['seed']} draws them again"]


def _headroom(results: list[Result]) -> list[str]:
    """Of each kernel with a tolerance, the largest part of it that was used."""
    most: dict[str, Result] = {}
    for result in results:
        if result.headroom is not None and result.kernel:
            best = most.get(result.kernel)
            if best is None or best.headroom is None or result.headroom > best.headroom:
                most[result.kernel] = result
    used = {name: share(result.headroom or 0.0).removesuffix(" of") for name, result in most.items()}
    width = max(map(len, used.values()), default=0)
    rows = [f"  {name:<28}{used[name]:>{width}}  {result.id}" for name, result in sorted(most.items())]
    return ["tolerance used at most, by kernel (the others are exact):", *rows] if rows else []


def junit(report: Report) -> str:
    """The results as JUnit XML, one suite a level."""
    suites = []
    for level in LEVELS:
        mine = [r for r in report.results if r.level == level]
        if not mine:
            continue
        count = {outcome: sum(r.outcome == outcome for r in mine) for outcome in OUTCOMES}
        cases = "".join(_case(result) for result in mine)
        suites.append(
            f'<testsuite name="{level}" tests="{len(mine)}" failures="{count["fail"]}" errors="{count["error"]}" '
            f'skipped="{sum(count[one] for one in SKIPPED)}" time="{sum(r.seconds for r in mine):.3f}">{cases}</testsuite>'
        )
    return f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="polydraft-conformance">{"".join(suites)}</testsuites>\n'


def _case(result: Result) -> str:
    tag = {"fail": "failure", "error": "error", **dict.fromkeys(SKIPPED, "skipped")}.get(result.outcome)
    message = _NOT_XML.sub("\ufffd", result.message)
    inner = f"<{tag} message={quoteattr(message)}>{escape(message)}</{tag}>" if tag else ""
    place, _, name = result.id.partition("/")
    return f'<testcase classname={quoteattr(place)} name={quoteattr(name)} time="{result.seconds:.4f}">{inner}</testcase>'
