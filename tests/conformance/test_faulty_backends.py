"""The faulty backends around the reference and the emulator: each mutant runs its killer alone and dies of its fault."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.conformance.fault_injection import BrokenGolden
from polydraft.conformance.faulty_backends import CORES, LEGAL_VARIANTS, MUTANTS, Mutant
from polydraft.conformance.outcomes import LEVELS, Result
from polydraft.conformance.proof import Proof, Task, Trial, matrix, prove
from polydraft.contracts.base import Case, Contract
from polydraft.contracts.large import surprise
from polydraft.plugins.default_backend import default_backend
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
    "M70": "rows in fp8", "M71": "rows in fp8", "M123": "a launch of swiglu", "M124": "a replay of", "M83": "of 16 bytes",
    "M84": "of 4194304 bytes", "M85": "copies wait, launches wait", "M86": "launches", "M87": "in front of a step",
    "M88": "filling meta", "M89": "event.record() waits", "M112": "mutant.clone", "M113": "behind launches of swiglu",
    "M114": "behind hundreds of steps", "M115": "use 100 of", "M116": "replayed", "M117": "launched behind a capture",
    "M121": "stream.wait()", "M122": "a launch of swiglu", "M125": "in front of an upload", "M126": "behind an upload",
    "M127": "in front of a load", "M128": "use 200 of",
    "M137": "work behind the event", "M138": "is -3, wanted", "M139": "behind launches of swiglu",
    "M230": "of layer 1'", "M231": "of layer", "M232": "behind a refill", "M233": "behind a refill",
    "M234": "on its refilled weights",
    "M235": "refills, grows by", "M236": "does not grow each time", "M237": "does not grow each time",
    "M238": "given back at level 1, seen", "M239": "that were closed, grows by", "M240": "other bindings",
    "M241": "free_memory() falls", "M301": "over 2 ranks",
}  # fmt: skip
"""Words that must be in what some killers say: that the mutant died of its fault and not of an accident."""


ASLEEP = [mutant for mutant in MUTANTS if mutant.killer == "L6/memory-while-asleep"]
"""Around the reference they are tried in a process of their own, since one that has run other tests has memory to spare."""


IN_16_BITS = [mutant for mutant in MUTANTS if "float32 alone" in mutant.moot]
"""They may live around the reference and the emulator, which compute in no other dtype."""


def around(mutant: Mutant) -> str:
    """Faults of order and of graphs are tried on the emulator, which is the worse device; `make deep` tries all on both."""
    if mutant in IN_16_BITS:
        return "cpu"
    return "emulator" if mutant.needs in ("graph_capture", "asynchronous") else "reference"


QUICK = [mutant for mutant in MUTANTS[::24] if mutant.killer not in ("L5/two-engines", "L4/launch-returns/linear")]
"""Without those whose killers take seconds."""


@pytest.mark.parametrize("mutant", among(QUICK, MUTANTS), ids=lambda mutant: mutant.id)
def test_mutant_is_killed(mutant: Mutant):
    name, alone = around(mutant), mutant in ASLEEP
    if name == "cpu" and default_backend().name != name:
        pytest.skip("the CPU backend is not built here")
    (trial,) = prove(
        name if alone else BACKENDS.get(name, name), mutants=[mutant], variants=(), limit_s=100 if alone else None
    ).trials
    assert (trial.unbroken, trial.broken) == ("pass", "fail"), trial
    assert SAID.get(mutant.id, "") in trial.message
    assert trial.ok, f"it was taken for {trial.looks}"
    if mutant.level == "L2" and isinstance(mutant.broken, BrokenGolden):
        assert mutant.id in trial.looks


DOOMED = """
import dataclasses, os
from polydraft import hookimpl, reference
from polydraft.conformance.fault_injection import launched
broken = launched("swiglu", lambda launch, device: lambda stream, n: os.abort())(reference)
globals().update({k: v for k, v in vars(broken).items() if k.startswith("polydraft_")})
info = polydraft_backend_info(spec="")

@hookimpl
def polydraft_backend_info():
    return dataclasses.replace(info, name="doomed")
"""


def test_what_crashes_does_so_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A backend one of whose kernels aborts: the others' mutants are tried all the same, and none in this process."""
    (tmp_path / "doomed.py").write_text(DOOMED)
    monkeypatch.setattr("polydraft.conformance.proof.run_task", lambda *given: pytest.fail("it ran here"))
    wanted = [mutant for mutant in MUTANTS if mutant.id in ("M17", "M22", "M44", "M46", "M37")]
    proof = prove("doomed", files=[str(tmp_path / "doomed.py")], mutants=wanted, variants=(), limit_s=60)
    found = {trial.id: (trial.unbroken, trial.broken, trial.looks) for trial in proof.trials}
    assert found == {
        "M17": ("pass", "fail", ("M17",)), "M22": ("fail", "not run", ()), "M37": ("pass", "fail", ("M37",)),
        "M44": ("fail", "not run", ()), "M46": ("pass", "fail", ("M46",)),
    }  # fmt: skip
    assert proof.status == 1


@pytest.mark.deep
def test_the_command_outlives_every_crash_of_the_proof(tmp_path: Path):
    (tmp_path / "doomed.py").write_text(DOOMED)
    polydraft = Path(sys.executable).with_name("polydraft")
    command = [str(polydraft), "conform", "doomed", "--plugin", str(tmp_path / "doomed.py"), "--prove", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert len(trials) == len(MUTANTS) + sum(len(variant.passes) for variant in LEGAL_VARIANTS)
    assert any(trial["broken"] == "fail" for trial in trials)


def test_a_seed_reaches_every_check_of_a_proof(monkeypatch: pytest.MonkeyPatch):
    """Here and in children: the number that draws the surprises is the run's."""
    asked: set[int] = set()

    def drawn(kernel: Contract, seed: int, number: int) -> Case:
        asked.add(seed)
        return surprise(kernel, seed, number)

    monkeypatch.setattr("polydraft.conformance.kernel_checks.surprise", drawn)
    one = Mutant("M00", "no mutant at all", "nowhere", "L2/swiglu/surprises", lambda plugin: plugin)
    assert prove("reference", mutants=[one], variants=(), seed=7).seed == 7
    assert asked == {7}
    given: dict[str, object] = {}

    def children(*_: object, **options: object) -> dict[Task, Result]:
        given.update(options)
        return {}

    monkeypatch.setattr("polydraft.conformance.isolation.run_tasks", children)
    prove("reference", mutants=[one], variants=(), seed=8, limit_s=1)
    assert given["seed"] == 8


def test_a_death_that_is_taken_for_another_is_a_wrong_trial():
    right = Trial("M17", "t", "L2/argmax/x", "pass", "fail", "", "mutant", "", ("M16", "M17"))
    assert right.ok
    assert dataclasses.replace(right, looks=()).ok
    assert not dataclasses.replace(right, looks=("M16",)).ok


@pytest.mark.deep
@pytest.mark.parametrize("name", BACKENDS)
def test_the_whole_matrix(name: str):
    """Around both, with nothing left out but sleep around the emulator, which has none: the reference is proved on its queued
    device."""
    alone = ASLEEP if name == "reference" else []
    proofs = [prove(BACKENDS[name], mutants=[mutant for mutant in MUTANTS if mutant not in alone])]
    proofs += [prove(name, mutants=alone, variants=(), limit_s=100)] if alone else []
    for proof in proofs:
        assert proof.status == 0, matrix(proof)
    mutants = [trial for proof in proofs for trial in proof.trials if trial.kind == "mutant"]
    left = {mutant.id: ("unsupported", "not run") for mutant in MUTANTS if mutant.needs == "sleep" and name == "emulator"}
    left |= {mutant.id: ("pass", "pass") for mutant in IN_16_BITS}
    assert {t.id: (t.unbroken, t.broken) for t in mutants if (t.unbroken, t.broken) != ("pass", "fail")} == left
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
