"""Which attention weights dropout keeps: Philox 4x32 with 7 rounds, addressed by position.

Key: the seed. Counter: (row, col, sequence * num_heads + head, offset), row and col being positions inside the sequence. The
mask depends on nothing else, so backward kernels with other tiles see the forward's mask. Philox is Salmon et al. 2011; 7
rounds are the fewest that pass BigCrush there. Row and col enter in the first round, one vector each: two of the seven
rounds cost next to nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """rng_state: pointer to int64 (seed, offset); threshold: floor(p * 2**32); all None without dropout."""

    rng_state: Any
    threshold: Any
    # 1 / (1 - p)
    keep_scale: Any


class RandomStream(NamedTuple):
    """Philox key and the constant words of the counter, for one head of one sequence."""

    seed: Any
    head_id: Any
    offset: Any


@triton.jit
def load_stream(dropout, head_id):
    if dropout.rng_state is None:
        return RandomStream(0, 0, 0)
    else:
        offset = tl.load(dropout.rng_state + 1).to(tl.uint32)
        return RandomStream(tl.load(dropout.rng_state), head_id.to(tl.uint32), offset)


@triton.jit
def keep(rows, cols, stream, dropout):
    """Mask of the weights that stay; rows and cols are int32 and broadcast against each other."""
    bits, _, _, _ = tl.philox(stream.seed, rows, cols, stream.head_id, stream.offset, ROUNDS)
    return bits >= dropout.threshold.to(tl.uint32)
