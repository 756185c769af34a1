"""The glossary: the code uses every term, and uses one name where vLLM, SGLang and FastDeploy have several for the same thing."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name, read, rows, section
from tests.support.project import ROOT

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CORE = sorted(ROOT.glob("core/**/*.py"))
# names.md and fastdeploy.md are the pages about the names in other projects.
CHECKED = [page for page in PAGES if page not in (ROOT / "docs" / "names.md", ROOT / "docs" / "fastdeploy.md")]

# Term to the other names that the field has for it, as regular expressions that stand for whole words, or whole parts of an
# identifier. Words on which the field agrees ("bonus token", "rejection sampler") are not here and may be used.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "slot": (r"sequence[ _-]?slots?", r"batch[ _-]?(ids?|idx|index)"),
    "block": (r"(kv|cache|memory|free|num|max)[ _-]?pages?", r"page[ _-]?(table|size|ids?|blocks?)"),
    "pass": (r"sub-?steps?",),
    "target": (r"(main|base|verifier)[ _-]?models?",),
    "proposer": (r"drafters?", r"speculators?"),
    "snapshot": (r"output[ _-]?messages?",),
}
AGREED = (
    "bonus token",
    "rejection sampler",
    "draft tokens",
    "speculative tokens",
    "candidate tokens",
    "lookahead tokens",
    "verify window",
)
"""Words of the field that mean one thing everywhere; the check lets them pass."""
PART = r"(?<![A-Za-z]){}(?![A-Za-z])"  # beside letters a pattern is only a piece of another word
# "upstream names in brackets" of a docstring are names in other projects, like the last column of the glossary.
UPSTREAM = re.compile(r"\[(?:substep|step_use_cudagraph|is_dummy_run|real_bsz|exist_prefill_flag)\]")

LIBRARY = re.compile(r"speculators(?= library|_model_type)")
"""A library of this name, whose checkpoints core reads."""


def glossary() -> list[list[str]]:
    """Rows of the glossary: terms, meaning, elsewhere."""
    return rows(section(read(ARCHITECTURE), "Glossary"))


def terms() -> list[str]:
    """Every term of the glossary."""
    return [term.strip() for row in glossary() for term in row[0].split(",")]


def synonyms(text: str) -> list[str]:
    """Banned words in `text`, each with the line it is on."""
    text = LIBRARY.sub("", UPSTREAM.sub("", text))
    found = []
    for term, patterns in SYNONYMS.items():
        hits = re.finditer(PART.format(f"(?:{'|'.join(patterns)})"), text, re.IGNORECASE)
        found += [f"line {text.count(chr(10), 0, hit.start()) + 1}: {hit[0]!r}, say {term}" for hit in hits]
    return found


@pytest.mark.parametrize("term", terms())
def test_the_code_uses_every_term(term: str):
    stem = re.escape(term).replace(r"\ ", "[ _]")
    pattern = re.compile(PART.format(stem + "(?:s|es)?"), re.IGNORECASE)
    assert any(pattern.search(read(path)) for path in CORE), f"no module of core says {term!r}; drop it from the glossary"


def test_core_uses_no_synonym():
    assert {name(path): found for path in CORE if (found := synonyms(read(path)))} == {}


@pytest.mark.parametrize("page", CHECKED, ids=name)
def test_documents_use_no_synonym(page: Path):
    text = read(page)
    if page == ARCHITECTURE:
        for row in glossary():
            assert f"| {row[2]} |" in text or not row[2], "the glossary's last column could not be taken out"
            text = text.replace(f"| {row[2]} |", "| |") if row[2] else text
    assert synonyms(text) == []


def test_synonyms_are_those_of_glossary_terms():
    assert set(SYNONYMS) <= set(terms())


@pytest.mark.parametrize(
    "text",
    ["num_kv_pages", "the page table", "batch_idx", "main_model", "class Drafter:", "substeps", "the output message"],
)
def test_check_sees(text: str):
    assert synonyms(text)


@pytest.mark.parametrize(
    "text", [*AGREED, "class PolydraftError", "paged_attention", "a contract's page", "`pass_index` [substep]"]
)
def test_check_lets_pass(text: str):
    assert not synonyms(text)
