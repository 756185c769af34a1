#!/bin/sh
# A vendor's whole journey, from a built wheel in an empty directory: install, a package, the tutorial, a claim, two faults that
# have to be named, record and replay, and away with it. Needs what pip needs. Run it as `tests/mission.sh` or in `make deep`.
#
#   tests/mission.sh [WHEEL]        a wheel of polydraft; without one, it is built from this checkout
#   PYTHON=python3.12 tests/mission.sh
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/polydraft-mission-XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
PYTHON=${PYTHON:-python3}
unset PYTHONPATH PYTHONHOME
export OPENBLAS_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

step() { printf '%s\n' "-- $*"; }
fail() { printf 'mission failed: %s\n' "$*" >&2; [ ! -s "$work/out" ] || tail -n 40 "$work/out" >&2; exit 1; }
# expect STATUS COMMAND...: what it prints, on both streams, is kept in $work/out
expect() {
    wanted=$1; shift
    got=0; "$@" >"$work/out" 2>&1 || got=$?
    [ "$got" = "$wanted" ] || fail "'$*' ended with $got, wanted $wanted"
    printf '%s  %s\n' "$got" "$*"
}
says() { grep -q -e "$1" "$work/out" || fail "wanted the words '$1'"; }

step 'build and install'
mkdir "$work/empty" "$work/source"
# Builds leave folders beside what they build, so they get a copy.
(cd "$root" && find . -maxdepth 1 -type f -exec cp {} "$work/source" \;)
for folder in core backends plugins; do
    [ ! -d "$root/$folder" ] || cp -R "$root/$folder" "$work/source"
done
find "$work/source" \( -name __pycache__ -o -name build -o -name '*.egg-info' \) -prune -exec rm -rf {} +
if [ $# -gt 0 ]; then
    wheel=$1
else
    expect 0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work/source"
    wheel=$(ls "$work"/dist/polydraft-*.whl)
fi
expect 0 "$PYTHON" -m venv "$work/venv"
PATH="$work/venv/bin:$PATH"
export PATH
cd "$work/empty"
expect 0 pip install --quiet "$wheel[conform]"
expect 0 pip install --quiet --no-deps "$work/source/plugins/emulator"

step 'doctor'
expect 0 polydraft doctor --json
says '"polydraft.doctor/1"'
says '"emulator"'

step 'the tutorial, every block of it: a fresh package proves nothing, seven kernels later the claim basic holds'
python "$root/tests/support/tutorial.py" || fail 'a step of docs/backends/tutorial.md'
grep -q "basic for .* (7 own, [0-9]* delegated), wholly delegated: .* holds" report/report.txt || fail 'the claim in report.txt'

step "the package's own tests: one import and one name"
expect 0 python -m pytest -q polydraft-mychip/tests
says 'passed'

# The same prompt on both; ids and rounds have to agree. A small budget of rows makes the prompt arrive in chunks.
prompt='def fibonacci(n): """The first n numbers of the sequence."""'
generate() { polydraft generate "$prompt" --draft-tokens 3 --max-new-tokens 24 --max-num-seqs 1 --max-batched-tokens 10 --ignore-eos --json "$@"; }
same() {  # same FILE FILE FIELDS...
    python - "$@" <<'PYTHON'
import json, sys
one, other = ([{f: r[f] for f in sys.argv[3:]} for r in json.load(open(file))["requests"]] for file in sys.argv[1:3])
sys.exit(one != other or not one)
PYTHON
}

step 'the same text and the same rounds as the reference'
generate --backend reference >reference.json
generate --backend mychip >mychip.json
same reference.json mychip.json token_ids rounds || fail 'ids or rounds of mychip differ from those of the reference'

step 'record and replay'
expect 0 generate --backend mychip --record good.safetensors --record-weights
expect 0 polydraft replay good.safetensors --backend emulator
says 'no difference'

kernels=polydraft-mychip/polydraft_mychip/kernels.py
cp "$kernels" kernels.py

step 'a fault of the draft side: the hidden row is told from a step counter'
cat >>"$kernels" <<'PYTHON'


def select_last_rows(a: Any, n: int) -> None:
    """Wrong: takes a sequence whose rows do not begin at position 0 for one window."""
    a.out[:n] = 0
    for i in np.flatnonzero(a.draft_slot[:n] >= 0):
        start = a.seq_start[i]
        behind = a.draft_position[i] - a.positions[start]
        a.out[i] = a.hidden[start + (min(behind, 3) if a.positions[start] > 0 else behind)]


KERNELS["select_last_rows"] = select_last_rows
PYTHON
generate --backend mychip >m01.json
same reference.json m01.json token_ids || fail 'verification heals a wrong draft, and ids differ all the same'
expect 1 polydraft conform mychip --profile basic
says 'M01'
says 'rerun: polydraft conform mychip --contract select_last_rows --case'
expect 0 generate --backend mychip --record bad.safetensors --record-weights
expect 1 polydraft replay bad.safetensors --backend emulator
says 'first difference: .*select_last_rows'
says 'out\['

step 'drafting silently off'
cp kernels.py "$kernels"
cat >>"$kernels" <<'PYTHON'


def begin_draft(a: Any, n: int) -> None:
    """Wrong: no sequence ever drafts."""
    a.draft_slot[:n], a.draft_position[:n], a.draft_budget[:n] = -1, 0, 0
    slots = a.slot_order[:n][(a.slot_order[:n] >= 0) & (a.seq_len[:n] > 0)]
    a.drafts[slots], a.draft_len[slots] = NO_TOKEN, 0


KERNELS["begin_draft"] = begin_draft
PYTHON
generate --backend mychip >m18.json
same reference.json m18.json token_ids || fail 'ids without drafts differ'
expect 1 polydraft conform mychip --profile basic
says 'M18'
cp kernels.py "$kernels"

step 'away with it'
expect 0 pip uninstall --quiet --yes polydraft-mychip
expect 2 generate --backend mychip
says "no plugin 'mychip' in polydraft.backends"
generate --backend reference >again.json
same reference.json again.json token_ids rounds || fail 'another backend was affected'

step 'mission accomplished'
