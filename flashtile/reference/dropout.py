"""Which attention weights dropout keeps: Philox 4x32 with 7 rounds, addressed by position.

Key: the seed. Counter: (row, col // 4, sequence * num_heads + head, offset), row and col being positions inside the sequence;
word col % 4 decides.
torch has no arithmetic on uint32, so words are kept in int64 tensors. Source: Salmon et al. 2011, Parallel random numbers:
as easy as 1, 2, 3.
"""

import torch

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


def threshold(dropout_p) -> int:
    """A weight stays where its random word is not below this."""
    return int(dropout_p * 2**32)


def keep_scale(rows: slice, cols: slice, seqs, rng_state, dtype):
    """What to multiply weights with: 0 or 1 / (1 - dropout_p), (batch, heads_kv, group, rows, cols); None without dropout."""
    problem = seqs.problem
    if not problem.dropout_p:
        return None
    device = rng_state.device
    seed, offset = rng_state.unbind()
    sequence = positions(seqs.batch, device)[:, None, None, None]
    head = torch.arange(problem.num_heads, device=device)[None, :, None, None]
    row = positions(rows, device)[:, None]
    col = positions(cols, device)[None, :]
    counter = row, col // 4, (sequence * problem.num_heads + head) & WORD, offset & WORD
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & WORD, (seed >> 32) & WORD))), -1)
    bits = words.gather(-1, (col % 4).expand(words.shape[:-1])[..., None])[..., 0]
    keep = bits >= threshold(problem.dropout_p)
    return keep.unflatten(1, (problem.num_heads_kv, problem.group_size)).to(dtype) / (1 - problem.dropout_p)


def drop(weights, keep):
    return weights if keep is None else weights * keep
