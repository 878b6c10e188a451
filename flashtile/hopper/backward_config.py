"""Which backward the Hopper tier has for a problem: refusals, tiles, the order of heads. Imports neither triton nor a GPU."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from flashtile.tiles import KeyTileConfig, group_splits, live_columns, packed_tiles, padded_dim, programs_in_order

# Scores start from -lse / scale (see backward.py): a scale near 0 would overflow there.
SMALLEST_SCALE = 2.0**-40


@dataclass(frozen=True, slots=True)
class BackwardConfig(KeyTileConfig):
    """Tiles of the main kernel; num_stages is that of q.

    by_rows: two partitions own 64 keys each and do every product but dq; else they own the same keys and a product each.
    """

    by_rows: bool = True
    dout_stages: int = 2
    dscores_stages: int = 2
    # of a thread of the two computing partitions
    registers: int = 208
    # one to a multiprocessor
    num_programs: int = 132
    # of a head, each with a dk and dv of its own
    query_parts: int = 1
    # of sums, see `has_fixed_order`
    fixed_order: bool = False

    @property
    def parts(self) -> int:
        """How many give a dk and dv for the same keys."""
        return self.splits * self.query_parts


# By the larger padded head dim. Chosen among, on an H200 at 4096 tokens without a mask, TFLOP/s of a first version (the rows
# below: 557 to 628 at head dim 128, 502 at 64, 467 at 256; not recorded):
#   128: 2 stages of q 376; 1 buffer of dscores 506; 3 stages of dout 557; dq by the computing partitions 505, loads by dq's 519
#   64: dq in halves 497; loads by dq's partition 490; 64 queries a tile 430
#   256: 1 buffer of dq and 2 stages of dout 387; 2 buffers of p and dscores 392
# At 64 a third buffer of dscores takes 0.94 to 1.00 of the time without a mask, 1.00 to 1.02 causal (one run, not recorded).
CONFIGS = {
    64: BackwardConfig(128, 128, 16, 3, dscores_stages=3),
    128: BackwardConfig(64, 128, 16, 4, dout_stages=3),
    256: BackwardConfig(64, 64, 16, 2, by_rows=False, dout_stages=1, dscores_stages=1),
}
# At 64, 64 queries a tile with a softcap or dropout, whose instructions are what takes time, under a mask and in short calls:
# H200, us, single runs of 3 to 5 shuffled rounds, 16 heads, softcap 30, then dropout: causal 16 x 512 162 to 129, 158 to 134;
# 4 x 2048 333 to 275, 323 to 298; 2 x 8192 2058 to 1746, 2050 to 1940; packed 64 of 1 to 1024 833 to 669, a window of 1024 of
# 16k 692 to 568; full 512 168 to 160, 178 to 167, but 8192 3246 to 3475, 3510 to 3679. Without them 4 x 2048 causal 213 to
# 225, full 346 to 378, 16 x 512 108.3 to 108.8, a window of 256 of 16k 234 to 231, of 1024 435 to 449. At 128 32 queries a
# tile 353 to 419, so 410 to 459, 444 to 479.
# Also where they leave fewer rows of the last tile empty: H100, us, medians of 9 shuffled rounds (cuDNN), 12 heads, full
# 256 x 50 239 to 194 (189), 256 x 64 250 to 203 (219), 128 x 129 280 to 251 (261), 128 x 192 309 to 281 (317), 128 x 197 313
# to 313; 16 heads, 64 x 257 334 to 311 (363), 48 x 448 397 to 381 (466), 32 x 513 370 to 361 (439), 24 x 700 381 to 377 (476),
# but 32 x 577 376 to 392, 16 x 900 411 to 412. Causal 128 x 60 133 to 108 (116), 128 x 129 269 to 237 (233), 64 x 257 304 to
# 278 (304), 48 x 400 332 to 310 (366). Packed 256 of 1 to 128 299 to 277, of 1 to 254 497 to 471, of 1 to 512 924 to 901.
FEW_ROWS = BackwardConfig(64, 128, 16, 4, dout_stages=3)
# For larger head dims with at most 320 columns of dk and dv, as 192/128: those of 128 keys fit in registers beside scores of 32
# queries. A tile of 64 keys reads and adds to twice as many bytes in L2, whose rate is the limit there (see backward.py).
FLAT = BackwardConfig(32, 128, 16, 4, dout_stages=2, registers=216)


def refuses(problem, device) -> str | None:
    """Why there is no backward for a problem, or None."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"the backward takes float16 and bfloat16, not {problem.dtype}"
    if problem.varlen and (problem.seqlen_k == 0 or problem.total_k == 0):
        return "the backward takes no packed call without keys"
    if problem.unaligned:
        return "TMA needs strides of q, k and v that are multiples of 16 bytes"
    for given, name in (
        (_padded_rows(problem) >= 2**31, "2**31 rows and more, which TMA can't count"),
        (abs(problem.softmax_scale) < SMALLEST_SCALE, "a softmax scale of nearly 0"),
    ):
        if given:
            return f"the backward does not take {name}"
    return None


def _padded_rows(problem):
    """At most so many row statistics the kernels keep: rows of each head, a multiple of 128 of each sequence."""
    if problem.varlen:
        return problem.num_heads * (problem.total_q + 128 * problem.batch + 127)
    return problem.batch * problem.num_heads * (problem.seqlen_q + 127)


def _has_few_rows(problem) -> bool:
    """Whether FEW_ROWS is for a call of head dims to 64."""
    if problem.softcap or problem.dropout_p:
        return problem.masked or problem.mean_keys <= 1024
    # Rows of a sequence's tiles; half of a packed one's last tile is empty, on average
    few, many = (problem.mean_queries + rows // 2 if problem.varlen else -(-problem.seqlen_q // rows) * rows
                 for rows in (FEW_ROWS.tile_m, CONFIGS[64].tile_m))  # fmt: skip
    return few <= 0.93 * many


def _alone(problem, config):
    """Whose keys are one tile, and seen in part by each query, as `backward.is_alone` says: "no" sequence's, "all", or in
    packed calls those of "some": these are looked at where sequences have up to two tiles of keys on average.
    """
    left, right = problem.window
    if left is not None:
        return "no"
    if problem.varlen:
        return "some" if problem.total_k <= 2 * config.tile_n * problem.batch else "no"
    every_row = right is None or problem.seqlen_k - problem.seqlen_q + right >= 0
    return "all" if problem.seqlen_k <= config.tile_n and every_row else "no"


# Packed calls and windows: the order is fixed where a query sees up to so many keys without a mask, causal, and in a window,
# by the larger padded head dim and whether heads share keys. Time over that of the order of arrival, H200, single runs, medians
# of 5 or 6 shuffled rounds, 16384 tokens of 2048 columns, causal: packed 32 x 512 0.94. A window of 255 keys of 16k 0.88, 511
# 0.92, 1023 0.95, 4095 1.05; at 64 of 127 1.02, 255 1.08 to 1.12, 1023 1.03. Heads that share keys, 32 on 8: packed 32 x 512
# 0.83, 33 of 100 to 1092 0.87; windows of 1023 and 4095 1.20, 1.28; 64: windows of 127 0.81, 1023 1.06.
_ANY = float("inf")
_MOST_KEYS_IN_ORDER = {
    (64, False): (_ANY, _ANY, 0), (64, True): (0, _ANY, 200), (128, False): (2100, 2100, 1100), (128, True): (0, 600, 0),
}  # fmt: skip
# Not of few tiles, whose programs begin one after the other: 2 x 1024 of 16 heads of 128 1.16 times as long
_TILES_A_PROGRAM_IN_ORDER = 3


def _block(problem) -> int:
    """The larger padded head dim."""
    return padded_dim(max(problem.head_dim, problem.head_dim_v), 2)


def _orders(problem, config) -> tuple[bool, ...]:
    """Whether sums are added up in a fixed order: where a deterministic call has any, and where it may take less time."""
    alone, shares_keys = _alone(problem, config), problem.group_size > config.splits
    if problem.deterministic:
        return (alone != "all" or shares_keys,)
    # At 256 it takes longer: causal 4 x 2048 of 16 heads on 8 1.33 times as long
    if alone != "no" or problem.softcap or problem.dropout_p or _block(problem) > 128:
        return (False,)
    left, right = problem.window
    tiles = problem.total_k // config.tile_n if problem.varlen else problem.batch * -(-problem.seqlen_k // config.tile_n)
    are_many = problem.num_heads_kv * config.splits * tiles >= _TILES_A_PROGRAM_IN_ORDER * config.num_programs
    if problem.varlen or left is not None:
        full, causal, windowed = _MOST_KEYS_IN_ORDER[_block(problem), shares_keys]
        most_keys = windowed if left is not None else full if right is None else causal
        return (are_many and problem.mean_keys <= most_keys,)
    return (False, True) if are_many or shares_keys and right is not None else (False,)


def stores_dq(problem, config):
    """Whose dq the main kernel writes in its dtype, no kernel after it: of "no" sequence; of "all" or "some" as `_alone` says;
    or, in a fixed order, of all by the "last" tile of keys that adds to it.
    """
    alone = _alone(problem, config)
    if alone == "all" or not config.fixed_order:
        return alone
    # With larger head dims it takes longer: 256 causal 8 x 2048 1.21, 192/128 has 208 bytes of spills
    return "last" if _block(problem) <= 128 else "no"


# Steps that the begin and the end of a walk take, and those that adding the parts takes, without a mask and causal. H200, us,
# single runs, medians of 5 or 6 shuffled rounds. Without a mask with 1 part, 2, 3, 4, 6, 8, 12 (best: *), keys then queries;
# head dim 64: 77, 8 x 4096 of 10 heads 106, 117, 98*, 107, 108, 112, 118; 4 x 4096 93, 66, 57*, 71, 65, 72, 74; 2 x 4096 86,
# 58, 47, 44, 41*, 51, 46; 4096 83, 53, 43, 39, 36, 34, 33*; 226, 17776 of 48 525, 551, 555, 482*, 513, 496, 505; 256, 4 x 4096
# of 20 241, 220, 212*, 213, 225, 232, 242; 128: 512, 32760 of 40 2532, 2087, 1943, 1885*, 1974, 1911, 1933; 1024, 65536 of 4
# 1998, 1068, 764, 638*, 792, 648, 655; 512, 512 of 16 35*, 36, 43. Causal with 1, 2, 3, 4, 6 of as many queries as keys; 128:
# 4096 of 4 heads 143, 101*, 111, 116, 131; of 2 136, 88, 70, 66*, 78; of 1 133, 82, 65, 56, 51*; of 6 153, 151*, 154, 164, 181;
# of 7 157*, 167; 8192 of 1 252, 145, 111, 97*, 110; 2048 of 4 79, 59, 50*, 53, 63; of 8 85, 70*, 78, 85, 100; 1024 of 16 57,
# 56*, 64; of 8 50, 45, 42*, 46, 55; 512 of 16 36*, 37, 39; 64: 4096 of 4 93, 69*, 73, 77, 85; 2048 of 8 57, 51*, 54, 58, 67;
# 1024 of 12 37, 37*, 40; 256: 4096 of 2 175, 121*, 132, 138, 156; 2048 of 4 101, 82*, 90, 99, 118; 1024 of 8 63, 62*, 71
_BORDER_AND_ADDING = {False: (3, 3), True: (5, 2)}
# Of the time of one part; causal ones are better known
_MOST_TIME = {False: 0.9, True: 0.95}
_MOST_QUERY_PARTS = 16


def may_cut_queries(problem, config) -> bool:
    """Whether walks may have parts: those of one head. With a window's left edge, packed, or causal in a fixed order, has not
    been tried."""
    left, right = problem.window
    is_tried = not problem.varlen and left is None and (right is None or not config.fixed_order)
    return is_tried and problem.seqlen_k > 0 and problem.group_size <= config.splits


def _walks(problem, config) -> tuple[int, float]:
    """Tiles of queries of one head that see the tile of keys which most see, and a tile of keys on average."""
    left, right = problem.window
    tiles = -(-problem.seqlen_q // config.tile_m)
    longest = tiles if right is None else min(tiles, -(-(problem.seqlen_k + right) // config.tile_m))
    if left is not None and right is not None:
        longest = min(longest, -(-(left + right + config.tile_n) // config.tile_m) + 1)
    return longest, tiles * problem.mean_keys / problem.seqlen_k


def query_parts(problem, config) -> int:
    """Parts of the queries of a head: several where tiles of keys are too few for the programs, or causal walks too unlike to
    end together."""
    if not may_cut_queries(problem, config):
        return 1
    right = problem.window[1]
    border, adding = _BORDER_AND_ADDING[right is not None]
    tiles = -(-problem.seqlen_q // config.tile_m)
    units = problem.batch * problem.num_heads * -(-problem.seqlen_k // config.tile_n)
    programs = programs_in_order(problem.deterministic, config.num_programs)
    longest, mean = _walks(problem, config)

    def time(parts):
        unit = -(-longest // parts) + border
        if right is None:
            steps = -(-units * parts // programs) * unit
        else:
            # The longest come first
            steps = max(unit, units * (mean + parts * border) / programs)
        return steps + (adding if parts > 1 else 0)

    best = min(range(1, max(1, min(_MOST_QUERY_PARTS, tiles)) + 1), key=time)
    return best if time(best) <= _MOST_TIME[right is not None] * time(1) else 1


# Sequences of a packed call that are sorted where heads share keys, whose walks are long: at most so many, since of more some
# short ones are always among the last
_MOST_SORTED = 128


def sorted_sequences(problem, config) -> int:
    """Places for sequences of a packed call whose longest are taken first, a power of two; 0 where they stay as they are."""
    tiles = max_key_tiles(problem, config) * problem.num_heads_kv * config.splits
    # Whose heads go down hangs on it, and so the order of sums
    programs = programs_in_order(problem.deterministic, config.num_programs)
    sorts = problem.group_size > config.splits and 1 < problem.batch <= _MOST_SORTED and tiles > programs
    return max(16, 1 << (problem.batch - 1).bit_length()) if sorts else 0


class _Step(NamedTuple):
    """Time of a step, a tile of queries by a tile of keys: us where heads share no keys, and where they share them.

    fixed_own, fixed_shared: by what factor it is longer in a fixed order, causal and without a mask. crowded: us more for each
    query head beyond `fitting` that programs are at, whose rows do not fit in L2 together.

    Of an H200, fitted to 82 calls, whose times are in tests/backward_times.json; of tiles of 32 queries one call was measured.
    """

    own: float
    shared: float
    fixed_own: tuple[float, float]
    fixed_shared: tuple[float, float]
    fitting: int
    crowded: float


# By tiles of queries and of keys, and the larger padded head dim
_STEPS = {
    (128, 128, 64): _Step(2.15, 2.28, (0.97, 0.97), (1.02, 1.25), 1000, 0.0),
    (64, 128, 64): _Step(1.08, 1.2, (0.97, 0.97), (1.1, 1.25), 1000, 0.0),
    (64, 128, 128): _Step(1.9, 1.95, (1.035, 1.07), (1.15, 1.25), 80, 0.0035),
    (32, 128, 256): _Step(1.5, 1.6, (1.12, 1.12), (1.2, 1.2), 80, 0.0035),
    (64, 64, 256): _Step(2.45, 2.45, (1.1, 1.1), (1.2, 1.2), 15, 0.015),
}  # fmt: skip
# Steps that a walk takes longer; causal in a fixed order
_WALK_STEPS, _WALK_STEPS_IN_ORDER = 2, 3
# Tiles of keys a program that the last group of heads has at least, under a causal mask
_LAST_TILES_A_PROGRAM = 1.75
# What part of a walk causal programs end later than if all had the same; of up to two, a long and a short one go together
_UNEVEN = 0.2
# What part of a step does not hang on how many columns count
_STEP_OF_NO_COLUMNS = 0.47
_BYTES_A_US = 4.2e6
# For each time that groups of heads are halved, which takes memory: what they must save
_SPLIT_MARGIN = 0.03
_LAUNCH_US, _CONVERT_US, _ADD_US = 10, 2, 2


def _backward_us(problem, config) -> float:
    """An estimate of what the backward takes.

    The steps of the program that ends last, and what passes over rows take: row statistics, dq_sum where there is one, parts.
    """
    causal, block, parts = problem.window[1] is not None, _block(problem), config.query_parts
    programs = programs_in_order(problem.deterministic, config.num_programs)
    group = problem.group_size // config.splits
    longest, mean = _walks(problem, config)
    heads, tiles = problem.batch * problem.num_heads_kv * config.splits, -(-problem.seqlen_k // config.tile_n)
    border = _WALK_STEPS_IN_ORDER if causal and config.fixed_order else _WALK_STEPS
    walks = heads * tiles * parts / programs
    walk = -(-longest // parts) * group + border
    if causal and walks > 1:
        # The longest come first
        uneven = _UNEVEN * min(1, max(0, 2 * walks - 4))
        steps = max(walk, (walks + uneven) * (mean * group / parts + border))
    else:
        steps = math.ceil(walks) * walk
    step, columns = _STEPS[config.tile_m, config.tile_n, block], live_columns(problem.head_dim, block) / block
    # At one time; programs that begin together are at the same rows
    many = max(0, group * min(heads, _LAST_TILES_A_PROGRAM * programs / tiles) - step.fitting) if walks > 1 else 0
    step_us = (step.own if group == 1 else step.shared) + step.crowded * many
    step_us *= _STEP_OF_NO_COLUMNS + (1 - _STEP_OF_NO_COLUMNS) * columns
    if config.fixed_order:
        step_us *= (step.fixed_own if group == 1 else step.fixed_shared)[not causal]
    size, rows = problem.dtype.itemsize, problem.batch * problem.seqlen_q * problem.num_heads
    us, row_bytes = _LAUNCH_US + steps * step_us, 2 * size * problem.head_dim_v
    if stores_dq(problem, config) == "no":
        us += _CONVERT_US
        row_bytes += (4 + 4 + size) * problem.head_dim
    if config.parts > 1:
        columns = problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
        us += _ADD_US + 2 * config.parts * problem.batch * problem.seqlen_k * columns * size / _BYTES_A_US
    return (us + rows * row_bytes / _BYTES_A_US) * (1 + _SPLIT_MARGIN * math.log2(config.splits))


def configs(problem, device) -> dict:
    """The choice that should end first."""
    found = choices(problem, device)
    return {"backward": found[0] if len(found) == 1 else min(found, key=partial(_backward_us, problem))}


def choices(problem, device) -> list[BackwardConfig]:
    """Of the tiles for the problem, parts of a group of query heads and orders of sums."""
    blocks = padded_dim(problem.head_dim, 2), padded_dim(problem.head_dim_v, 2)
    config = FEW_ROWS if max(blocks) == 64 and _has_few_rows(problem) else CONFIGS[max(blocks)]
    if max(blocks) == 256 and live_columns(problem.head_dim, blocks[0]) + live_columns(problem.head_dim_v, blocks[1]) <= 320:
        config = FLAT
        if min(blocks) == 256:
            # What shared memory holds, with a piece of dq or without
            config = replace(FLAT, num_stages=3 if stores_dq(problem, FLAT) == "no" else 2)
    config = replace(config, num_programs=device.num_sms)
    split = (replace(config, splits=splits) for splits in _numbers_of_splits(problem, config))
    return [_in_order(problem, config, fixed) for config in split for fixed in _orders(problem, config)]


def _numbers_of_splits(problem, config) -> list[int]:
    if problem.varlen or problem.seqlen_k == 0:
        return [group_splits(problem, config.tile_n, config.num_programs)]
    return [n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0]


def _in_order(problem, config, fixed) -> BackwardConfig:
    """config with the order of sums and what follows from it."""
    if fixed:
        # A third takes 0.99 to 1.08 of the time of two where the order is fixed (single runs, not recorded).
        config = replace(config, fixed_order=True, dscores_stages=min(config.dscores_stages, 2))
    return replace(config, query_parts=query_parts(problem, config))


def max_key_tiles(problem, config):
    """Tiles of keys of one head, in a packed call at most so many."""
    if problem.varlen:
        return packed_tiles(problem, config.tile_n, problem.total_k)
    return -(-problem.seqlen_k // config.tile_n)


# Heads of all sequences that are one group where they share keys and the order is fixed
_FEW_HEADS = 96
# Query heads of the last group whose rows fit in L2 at head dims over 128, and tiles of keys a program that it has all the same
_CROWD, _LAST_TILES_OF_A_CROWD = 60, 1.25


def heads_in_groups(problem, config):
    """(heads per group, heads of the last group) for `schedule.Order`; of packed calls rows of queries, and heads that share
    them.

    Causal: about two tiles a program in a group. Tiles of fewer heads are at the same queries at the same time, of more they
    share less in L2: at head dim 128 and 4096 tokens 448, 458, 488, 483, 473 TFLOP/s with 1, 2, 4, 8, 32 heads. One tile a
    program where query heads share keys: 32 heads, 8 of them a group, 2 x 8192 tokens 5.07 ms with 2 key-value heads, 5.25
    with 4 (one run, not recorded). Packed calls have not been tried with one. In a fixed order the last group goes down, all
    where heads share keys. With parts of the queries all heads are one group: so few tiles are.

    Without a mask in a fixed order all heads go up. Each of a head's tiles must stay a turn behind the one before, which delays
    the first ones alone if the last of those that run is not a whole walk behind the first: a tile gets twice as many steps as
    tiles of its head run at once.
    """
    causal = problem.window[1] is not None
    group_size = problem.group_size // config.splits
    fixed = config.fixed_order
    # Which heads go down changes the order of sums
    programs = programs_in_order(problem.deterministic, config.num_programs)
    all_heads = problem.batch * problem.num_heads_kv * config.parts
    if fixed and not causal:
        rows = 2 * programs * config.tile_m // group_size
        heads = max(1, min(rows // -(-problem.seqlen_q // config.query_parts), all_heads))
        return (rows, 1) if problem.varlen else (heads, 0)
    if problem.varlen:
        return (2 * programs * config.tile_n if causal else 0), 1
    if not causal:
        return 1, 0
    num_tiles = max_key_tiles(problem, config)
    if config.query_parts > 1:
        return all_heads, 0
    heads = min(16, max(1, (1 if group_size > 1 else 2) * programs // num_tiles))
    # Rows of many query heads do not fit in L2
    crowds = group_size > 1 and max(problem.head_dim, problem.head_dim_v) > 128
    if fixed:
        if group_size > 1 and not crowds and problem.batch * problem.num_heads <= _FEW_HEADS:
            return all_heads, all_heads
        # At least a tile a program, and some heads that go up
        heads = min(max(heads, -(-programs // num_tiles)), -(-all_heads // 2))
        return heads, heads
    last = math.ceil(_LAST_TILES_A_PROGRAM * programs / num_tiles)
    if crowds:
        last = min(last, max(math.ceil(_LAST_TILES_OF_A_CROWD * programs / num_tiles), _CROWD // group_size))
    return heads, all_heads - max(0, all_heads - last) // heads * heads
