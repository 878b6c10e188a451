"""Which attention weights dropout keeps: Philox 4x32 with 7 rounds, addressed by position.

Key: the seed. Counter: (row group, column group, sequence * num_heads + head, offset), of positions inside the sequence. A
group has rows r and r + 8, and columns c, c + 1, c + 8 and c + 9: it is what a thread of the matrix unit holds of 16 x 16
scores. Its four words are for (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8): the lower 15 bits decide about the first of two
neighbours, bits 16 to 30 about the second.
torch has no arithmetic on uint32, so words are kept in int64 tensors. Source: Salmon et al. 2011, Parallel random numbers:
as easy as 1, 2, 3.
"""

import torch

from flashtile.problem import DROPOUT_BITS
from flashtile.reference.lengths import positions

ROUNDS = 7
WORD = 0xFFFFFFFF
# multipliers of counter words 0 and 2, and what the two key words grow by in each round
MULTIPLY_0, MULTIPLY_2 = 0xD2511F53, 0xCD9E8D57
GROW_0, GROW_1 = 0x9E3779B9, 0xBB67AE85


def philox(counter, key, rounds=ROUNDS):
    """Four random words from four counter words and two key words.

    Args:
        counter: four int64 tensors that broadcast against each other, of values in [0, 2**32).
        key: two ints or int64 tensors in [0, 2**32).
        rounds: 7 is what flashtile uses, 10 what the published test vectors are for.
    Returns:
        four int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high_0, low_0 = _multiply(c0, MULTIPLY_0)
        high_2, low_2 = _multiply(c2, MULTIPLY_2)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + GROW_0) & WORD, (k1 + GROW_1) & WORD
    return c0, c1, c2, c3


def _multiply(a, b):
    """High and low word of the product; int64 wraps around, so its 64 bits are right although its sign is not."""
    product = a * b
    return (product >> 32) & WORD, product & WORD


def keep_scale(rows: slice, cols: slice, seqs, rng_state, dtype):
    """What to multiply weights with: 0 or `problem.keep_scale`, (batch, heads_kv, group, rows, cols); None without dropout."""
    problem = seqs.problem
    if not problem.dropout_p:
        return None
    device = rng_state.device
    seed, offset = rng_state.unbind()
    sequence = positions(seqs.batch, device)[:, None, None, None]
    head = torch.arange(problem.num_heads, device=device)[None, :, None, None]
    row = positions(rows, device)[:, None]
    col = positions(cols, device)[None, :]
    row_group, col_group = row // 16 * 8 + row % 8, col // 16 * 4 + col % 8 // 2
    counter = row_group, col_group, (sequence * problem.num_heads + head) & WORD, offset & WORD
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & WORD, (seed >> 32) & WORD))), -1)
    place = (row // 8 % 2 + 2 * (col // 8 % 2)).expand(words.shape[:-1])
    bits = words.gather(-1, place[..., None])[..., 0] >> 16 * (col % 2) & (2**DROPOUT_BITS - 1)
    keep = bits >= problem.dropout_threshold
    return keep.unflatten(1, (problem.num_heads_kv, problem.group_size)).to(dtype) * problem.keep_scale


def drop(weights, keep):
    return weights if keep is None else weights * keep
