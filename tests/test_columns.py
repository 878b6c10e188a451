"""PTX of device/columns.py, by an interpreter of the few instructions that it has: CI has no GPU."""

import random
import re

import pytest

pytest.importorskip("triton")

from flashtile.device import columns

_MINUS_INF = "0fFF800000"


def run(ptx, lane, operands):
    """What stands in the registers $0 and on, of one thread."""
    registers = {f"${i}": value for i, value in enumerate(operands)} | {"%laneid": lane, _MINUS_INF: float("-inf")}

    def value(name):
        return registers[name] if name in registers else int(name)

    for statement in ptx.strip("{} ").split(";"):
        words = re.split(r"[ ,]+", statement.strip())
        if words[0] in ("", ".reg"):
            continue
        operation, into, *sources = words
        x = [value(name) for name in sources]
        registers[into] = {
            "mov.u32": lambda x: x[0], "and.b32": lambda x: x[0] & x[1], "shl.b32": lambda x: x[0] << x[1],
            "sub.s32": lambda x: x[0] - x[1], "setp.gt.s32": lambda x: x[0] > x[1],
            "setp.le.and.s32": lambda x: x[0] <= x[1] and x[2], "selp.f32": lambda x: x[0] if x[2] else x[1],
        }[operation](x)  # fmt: skip
    return [registers[f"${i}"] for i in range(len(operands))]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("num_columns", [64, 128])
def test_hide(num_columns, both):
    """A thread of wgmma's accumulators has of each 8 columns two, of two rows that are 8 apart."""
    draw = random.Random(0)
    count = num_columns // 2
    for lane in range(32):
        ends = [draw.randint(-5, num_columns + 5) for _ in range(2)]
        firsts = [draw.randint(-5, num_columns + 5) for _ in range(2)]
        scores = [float(i) for i in range(count)]
        row = [i >> 1 & 1 for i in range(count)]
        operands = scores + [None] * count + [ends[r] for r in row] + [firsts[r] for r in row] * both
        # Outputs are $0 and on, tied to the scores: those have no numbers of their own in the text
        got = run(columns._HIDE.value[num_columns, both], lane, operands)[:count]
        for i in range(count):
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            seen = column < ends[row[i]] and (not both or column >= firsts[row[i]])
            assert got[i] == (scores[i] if seen else float("-inf")), (lane, i)
    constraints = columns._HIDE_CONSTRAINTS.value[num_columns, both].split(",")
    assert len(constraints) == len(operands) and constraints[count : 2 * count] == [str(i) for i in range(count)]
