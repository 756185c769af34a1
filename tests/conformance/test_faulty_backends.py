"""The faulty backends around the reference and the emulator: each mutant runs its killer alone and dies of its fault."""

from __future__ import annotations

import pytest

from polydraft.conformance.faulty_backends import CORES, LEGAL_VARIANTS, MUTANTS, Mutant
from polydraft.conformance.outcomes import LEVELS
from polydraft.conformance.proof import Proof, matrix, prove
from tests.conformance.doubles import BACKENDS
from tests.support.depth import among

SAID = {
    "M01": "select_last_rows", "M18": "acceptance trace", "M21": "replayed is", "M22": "allocated 1",
    "M24": "synchronised 1 times", "M25": "the run hangs", "M32": "the run hangs", "M33": "free and held at once",
    "M35": "a block is lost", "M38": "acceptance trace", "M39": "record[0]", "M40": "record[2]",
    "M42": "silently run the reference's code", "M44": "gate_up", "M45": "out[", "M47": "nothing was proved",
    "M52": "acceptance trace", "M55": "cache.k[", "M56": "logit_start", "M57": "a stream sees",
    "M58": "raised nothing", "M59": "out[", "M60": "a refusal that names linear/1 and x", "M61": "under the rule[",
    "M62": "on the old weights[", **dict.fromkeys(("M64", "M65", "M66", "M67", "M68", "M69"), "rows in int8"),
    "M70": "rows in fp8", "M71": "rows in fp8",
}  # fmt: skip
"""Words that must be in what some killers say: that the mutant died of its fault and not of an accident."""


def around(mutant: Mutant) -> str:
    """Faults of order and of graphs are tried on the emulator, which is the worse device; `make deep` tries all on both."""
    return "emulator" if mutant.needs in ("graph_capture", "asynchronous") else "reference"


@pytest.mark.parametrize("mutant", among(MUTANTS[::2], MUTANTS), ids=lambda mutant: mutant.id)
def test_mutant_is_killed(mutant: Mutant):
    (trial,) = prove(BACKENDS[around(mutant)], mutants=[mutant], variants=()).trials
    assert (trial.unbroken, trial.broken) == ("pass", "fail"), trial
    assert SAID.get(mutant.id, "") in trial.message


@pytest.mark.deep
@pytest.mark.parametrize("name", BACKENDS)
def test_the_whole_matrix(name: str):
    """Around both, with nothing left out: the reference is proved on its queued device."""
    proof = prove(BACKENDS[name])
    assert proof.status == 0, matrix(proof)
    mutants = [trial for trial in proof.trials if trial.kind == "mutant"]
    assert [(t.id, t.unbroken, t.broken) for t in mutants if (t.unbroken, t.broken) != ("pass", "fail")] == []
    assert len(mutants) == len(MUTANTS)


@pytest.mark.deep  # `make matrix` tries all of them, too
def test_the_shelf_lives():
    proof = prove(BACKENDS["emulator"], mutants=(), variants=LEGAL_VARIANTS)
    assert proof.status == 0, matrix(proof)
    assert len(proof.trials) == sum(len(variant.passes) for variant in LEGAL_VARIANTS)


def test_a_mutant_that_lives_fails_the_proof():
    harmless = Mutant("M00", "no mutant at all", "nowhere", MUTANTS[0].killer, lambda plugin: plugin)
    proof = prove("reference", mutants=[harmless], variants=())
    assert proof.status == 1
    assert "! M00  lives" in matrix(proof)


def test_a_mutant_that_may_live_says_why():
    moot = Mutant("M00", "no mutant at all", "nowhere", "L1/load-replaces-all", lambda plugin: plugin, moot="it changes nothing")
    proof = prove("reference", mutants=[moot], variants=())
    assert proof.status == 0
    assert "0 of 1 mutants killed around reference, 0 not tried, 1 make no difference; 0 trials are wrong" in matrix(proof)
    assert "M00 may live: it changes nothing" in matrix(proof)


def test_nothing_tried_is_nothing_proved():
    needing = [mutant for mutant in MUTANTS if mutant.needs][:1]
    assert prove("reference", device="cpu", mutants=needing, variants=()).status == 4
    assert Proof("none", ()).status == 4


def test_numbers():
    numbers = [mutant.id for mutant in MUTANTS]
    assert len(set(numbers)) == len(numbers)
    table = {f"M{i:02}" for i in range(1, 53)}
    assert table <= {*numbers, *CORES}
    assert not set(numbers) & set(CORES)
    assert {mutant.level for mutant in MUTANTS} <= set(LEVELS)
