"""Add what the parts of a group of query heads gave to the gradients of the keys and values that they share.

Where keys are few, a program has some heads of a group, not all (`splits` of a config), and a dk and dv of its own for them.
"""

import triton
import triton.language as tl

from flashtile.device import chain

ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def add_parts(parts, out, num_rows, SPLITS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              CHAINED: tl.constexpr = False):  # fmt: skip
    """out, (num_rows, DIM): the sums in fp32 of parts, (num_rows, SPLITS, DIM), in their order. Both contiguous.

    CHAINED: see chain.py.
    """
    chain.begin(CHAINED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < num_rows)[:, None] & (cols < DIM)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + (rows * SPLITS + part)[:, None] * DIM + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * DIM + cols, total.to(out.dtype.element_ty), mask=mask)


def launch_add(gradients, parts, blocks, splits, launch, chained=False):
    """Each of the gradients, contiguous, from its parts; where these are None nothing. blocks: padded head dims. chained: after
    a kernel of `chain`."""
    for gradient, its_parts, block in zip(gradients, parts, blocks, strict=True):
        if its_parts is not None:
            dim = gradient.shape[-1]
            rows = gradient.numel() // dim
            constexprs = {"SPLITS": splits, "ROWS": ROWS, "DIM": dim, "BLOCK_D": block, "CHAINED": chained}
            launch(add_parts, (triton.cdiv(rows, ROWS),), (its_parts, gradient, rows), constexprs, num_warps=4,
                   **chain.after(chained))  # fmt: skip
