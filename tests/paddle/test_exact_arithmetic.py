"""What Paddle kernels compute without the operations that a place may lack is exact: words, shares, borders of probability,
places in large tables."""

from __future__ import annotations

import json

from tests.support.paddle import forked, needs_device, needs_paddle

CODE = """
import json
import numpy as np
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place
device = open_place("cpu", DeviceOptions())
import paddle
from polydraft_paddle.kernels.rejection import product_below
from polydraft_paddle.kernels.sampling import fixed, fixed_scale, log1p, share
from polydraft_paddle.words import BitWords, TableWords

rng = np.random.default_rng(0)
there = paddle.to_tensor
said = {}

# -- words --
edges = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x80000001, 0xFF00FF00], np.uint64)
a, b = (np.concatenate([one.ravel(), rng.integers(0, 2**32, 2000, np.uint64)]) for one in np.meshgrid(edges, edges))
mod = np.uint64(2**32)
for words in (BitWords(), TableWords(device.place)):
    x, y = (words.of(there(one.astype(np.uint32).view(np.int32))) for one in (a, b))
    def bits(found):  # the upper 24 bits, and the lower eight once they have been turned there
        high, low = (words.upper_24(one).numpy().astype(np.uint64) for one in (found, words.rotate_left(found, 24)))
        return high << np.uint64(8) | low >> np.uint64(16)
    pairs = [(x, a), (words.xor(x, y), a ^ b), (words.add(x, y), (a + b) % mod)]
    pairs.append((words.add(x, y, 5), (a + b + np.uint64(5)) % mod))
    wrong = [int((bits(found) != want).sum()) for found, want in pairs]
    for turn in (1, 13, 16, 29, 31):
        want = (a << np.uint64(turn) | a >> np.uint64(32 - turn)) % mod
        wrong.append(int((bits(words.rotate_left(x, turn)) != want).sum()))
    said[type(words).__name__] = wrong

# -- products against a bound --
k = rng.integers(0, 2**24, 20000)
u, q = (k * 2.0**-24).astype(np.float32), rng.random(20000, np.float32) * np.exp2(-rng.integers(0, 30, 20000)).astype(np.float32)
near = (u.astype(np.float64) * q).astype(np.float32)
p = np.choose(rng.integers(0, 3, 20000), [near, np.nextafter(near, np.float32(1)), np.nextafter(near, np.float32(0))])
want = u.astype(np.float64) * q < p.astype(np.float64)  # 48 digits are exact in float64
found = product_below(there(u), there(q), there(p)).numpy()
said["products"] = [int((found != want).sum()), int(want.sum()), int((u * q == p).sum())]

# -- sums and shares --
mass = np.exp(rng.standard_normal((3, 70000)) * 4 - 12).clip(0, 1).astype(np.float32)
mass[:, 0] = 1.0
exact = fixed(there(mass))
total = exact.sum(axis=1, keepdim=True)
scale = int(fixed_scale(70000))
wanted = [sum(int(float(m) * scale) for m in row) for row in mass]
said["sums"] = total.numpy()[:, 0].tolist() == wanted
parts = np.float32([0.0, 0.1, 0.9])
bounds = share(total, there(parts[:, None])).numpy()[:, 0].tolist()
said["shares"] = [bound - -(-w * int(float(part) * 2**30) // 2**30) for bound, w, part in zip(bounds, wanted, parts)]
x = np.concatenate([np.exp(rng.uniform(-60, 10, 20000)), -np.exp(rng.uniform(-60, -0.7, 20000))]).astype(np.float32)
want = np.log1p(x.astype(np.float64))
said["log1p"] = float(np.abs(log1p(there(x)).numpy() / want - 1).max())
print(json.dumps(said))
"""


@needs_paddle
def test_words_products_sums_and_shares_are_exact():
    run = forked(CODE)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout)
    assert said["BitWords"] == said["TableWords"] == [0] * 9
    wrong, below, at_the_border = said["products"]
    assert wrong == 0
    assert 4000 < below < 16000
    assert at_the_border > 4000, "the rounded product does not decide these"
    assert said["sums"] is True
    assert said["shares"] == [0, 0, 0]
    assert said["log1p"] < 4e-7


LARGE = """
import sys
import numpy as np
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place, ops
place, rows, columns, ops.LARGEST = sys.argv[1], *map(int, sys.argv[2:])
device = open_place(place, DeviceOptions())
import paddle
table = np.zeros((rows, columns), np.uint8 if place == "cpu" else np.float32)
table[-1, -3:] = 1, 2, 3
there = paddle.from_dlpack(table) if place == "cpu" else paddle.to_tensor(table)
row = paddle.to_tensor(np.int32([[rows - 1], [0]]))
print(ops.pick(there, row, paddle.to_tensor(np.int32([[columns - 3, columns - 2, columns + 9]]))).numpy().tolist())
"""


def looked_up(*arguments: object) -> list[list[int]]:
    run = forked(LARGE, *map(str, arguments))
    assert run.returncode == 0, run.stderr[-2000:]
    found: list[list[int]] = json.loads(run.stdout)
    return found


@needs_paddle
def test_a_place_in_a_table_may_be_beyond_32_bits():
    """Of log probabilities and distributions of many rows. Of these two gibibytes few pages are ever touched."""
    assert looked_up("cpu", 2**13 + 1, 2**18, 2**31 - 1) == [[1, 2, 3], [0, 0, 0]]


@needs_device
def test_such_a_place_takes_no_operation_that_a_chip_lacks():
    assert looked_up("polyemu:0?ops=xpu3", 9, 16, 127) == [[1, 2, 3], [0, 0, 0]]
