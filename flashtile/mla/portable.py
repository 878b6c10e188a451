"""The portable kernels of latent attention decode, in Triton, and the one that merges partial results.

A program owns TILE_M rows (query token, head) and one part of the schedule; rows that share a cache lie side by side, so that
one load of a key serves all of them:

    scores = q_latent cᵀ + q_rope k_ropeᵀ;  p, row_max, row_sum = online softmax;  acc = acc * correction + p c

Keys are (c, k_rope) and values are c: a tile is loaded once and multiplied twice. Where a key lies comes from the block table,
or with indices from them; what is hidden is not loaded, so unused slots may hold NaN and unused entries of the block table
anything. Packed tokens are made bf16 after the load.

Refuses packed caches below sm_89, where e4m3 is not in hardware. What it reaches on an H200 is in
benchmarks/results/nvidia-h200/mla-portable.json: a quarter of the product rate at 128 heads, 40% of the copy bandwidth at 16.
Source: Dao et al. 2023, Flash-Decoding.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile import settings
from flashtile.device import chain, softmax
from flashtile.device.launch import Launches
from flashtile.device.merge import LSE_COPIES, merge_rows, store_rows
from flashtile.device.numerics import LOG2_E, NEG_INF, dot
from flashtile.device.tensors import Rows, head_ptr
from flashtile.mla import cache, order, schedule
from flashtile.mla.problem import table_shape
from flashtile.outputs import fresh
from flashtile.tiles import TileConfig

SCALE_GROUP = tl.constexpr(cache.SCALE_GROUP)


class Keys(NamedTuple):
    """Where keys lie: the cache as latent, scales (None unless packed) and rotary part, each Rows with pages for batches.

    A kernel makes it: Keys(*keys, num_slots, entry_stride), see `device.cache.BOUNDS`.
    """

    latent: Any
    scales: Any
    rope: Any
    page_size: Any
    # int32 pointers; one of the two is None
    block_table: Any
    indices: Any
    num_slots: Any
    # From row to row of the block table or the indices
    entry_stride: Any


@triton.jit
def entry_ptrs(keys, sequence, cols):
    """Where the block table or the indices hold the tokens `cols` of a sequence."""
    if keys.indices is None:
        return keys.block_table + sequence.to(tl.int64) * keys.entry_stride + cols // keys.page_size
    else:
        return keys.indices + sequence.to(tl.int64) * keys.entry_stride + cols


@triton.jit
def look_up(keys, sequence, cols, length):
    """What is at `entry_ptrs`. Hidden tokens are not looked up: page 0, or no index."""
    return tl.load(entry_ptrs(keys, sequence, cols), mask=cols < length, other=0 if keys.indices is None else -1)


@triton.jit
def place(keys, entries, cols, length):
    """(page, offset in it, visible) of the tokens `cols`, by what was looked up; pages are limited to those that exist."""
    if keys.indices is None:
        page = tl.minimum(tl.maximum(entries, 0), keys.num_slots // keys.page_size - 1)
        return page, cols % keys.page_size, cols < length
    else:
        visible = (entries >= 0) & (entries < keys.num_slots)
        slot = tl.where(visible, entries, 0)
        return slot // keys.page_size, slot % keys.page_size, visible


@triton.jit
def token_ptrs(x, page, offset, head):
    place = page.to(tl.int64) * x.batch_stride + offset.to(tl.int64) * x.row_stride
    return x.ptr + place + head.to(tl.int64) * x.head_stride


@triton.jit
def _load_latent(keys, page, offset, visible, head, LATENT: tl.constexpr, dtype: tl.constexpr):
    """(TILE_N, LATENT), zeros where hidden."""
    dims = tl.arange(0, LATENT)
    ptrs = token_ptrs(keys.latent, page, offset, head)[:, None] + dims[None, :]
    latent = tl.load(ptrs, mask=visible[:, None], other=0.0)
    if keys.scales is None:
        return latent
    else:
        GROUPS: tl.constexpr = LATENT // SCALE_GROUP
        scale_ptrs = token_ptrs(keys.scales, page, offset, head)[:, None] + tl.arange(0, GROUPS)[None, :]
        scales = tl.load(scale_ptrs, mask=visible[:, None], other=0.0)
        groups = latent.to(tl.float32).reshape(latent.shape[0], GROUPS, SCALE_GROUP) * scales[:, :, None]
        return groups.reshape(latent.shape[0], LATENT).to(dtype)


@triton.jit
def _absorb_tile(state, acc, q_latent, q_rope, keys, sequence, tile_begin, length, limits, head, scale_log2,
                 TILE_N: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """TILE_N keys from tile_begin on. limits: (TILE_M,) keys that a row may see."""
    cols = tile_begin + tl.arange(0, TILE_N)
    page, offset, visible = place(keys, look_up(keys, sequence, cols, length), cols, length)
    latent = _load_latent(keys, page, offset, visible, head, LATENT, q_latent.dtype)
    # (TILE_M, TILE_N)
    scores = dot(q_latent, latent.T)
    if ROPE > 0:
        rope_ptrs = token_ptrs(keys.rope, page, offset, head)[:, None] + tl.arange(0, ROPE)[None, :]
        rope = tl.load(rope_ptrs, mask=visible[:, None], other=0.0)
        scores = dot(q_rope, rope.to(q_latent.dtype).T, scores)
    logits = tl.where(visible[None, :] & (cols[None, :] < limits[:, None]), scores * scale_log2, NEG_INF)
    state, p, correction = softmax.update(state, logits, 1.0, True)
    acc = dot(p.to(latent.dtype), latent, acc * correction[:, None])
    return state, acc


@triton.jit(do_not_specialize=["num_slots", "entry_stride", "num_sequences", "num_rows", "seqlen_q", "fixed_length"])
def decode(
    q, out, lse, keys, num_slots, entry_stride, partial_out, partial_lse, table, lengths, sinks, softmax_scale, num_sequences,
    num_rows, num_heads_kv, seqlen_q, fixed_length, TILE_M: tl.constexpr, TILE_N: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, GROUP_SIZE: tl.constexpr, SEQUENCES_PER_LENGTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    LSE_WITH_SINKS: tl.constexpr,
):  # fmt: skip
    """q, out, lse: Rows. keys, num_slots, entry_stride: of Keys.

    partial_out: fp32 (slots, num_heads_kv, num_rows, LATENT); partial_lse the same with LSE_COPIES for LATENT.
    lengths: int32 pointer, one for SEQUENCES_PER_LENGTH sequences each, or None: fixed_length, which bounds them anyway.
    """
    keys = Keys(*keys, num_slots, entry_stride)
    num_m_tiles = tl.cdiv(num_rows, TILE_M)
    head_kv = tl.program_id(0) // num_m_tiles
    rows = (tl.program_id(0) % num_m_tiles) * TILE_M + tl.arange(0, TILE_M)
    part = tl.program_id(1)
    begin, begin_tile, last, end_tile = schedule.part_of_program(table, part, num_sequences)
    tokens = rows // GROUP_SIZE
    heads = head_kv * GROUP_SIZE + rows % GROUP_SIZE
    row_exists = rows < num_rows
    dims = tl.arange(0, LATENT)
    q_offsets = tokens.to(tl.int64) * q.row_stride + heads.to(tl.int64) * q.head_stride
    scale_log2 = softmax_scale * LOG2_E
    for i in range(last - begin + 1):
        sequence = begin + i
        length = schedule.key_length(lengths, sequence, fixed_length, SEQUENCES_PER_LENGTH)
        num_tiles = schedule.num_tiles_of(length)
        first, end = schedule.part_tiles(sequence, num_tiles, begin, begin_tile, last, end_tile)
        q_ptrs = q.ptr + sequence.to(tl.int64) * q.batch_stride + q_offsets
        q_latent = tl.load(q_ptrs[:, None] + dims[None, :], mask=row_exists[:, None], other=0.0)
        q_rope = q_latent
        if ROPE > 0:
            q_rope = tl.load(q_ptrs[:, None] + LATENT + tl.arange(0, ROPE)[None, :], mask=row_exists[:, None], other=0.0)
        limits = tl.zeros((TILE_M,), tl.int32) + length
        if IS_CAUSAL:
            limits = limits - seqlen_q + tokens + 1
        state = softmax.OnlineSoftmax(tl.full((TILE_M,), NEG_INF, tl.float32), tl.zeros((TILE_M,), tl.float32))
        acc = tl.zeros((TILE_M, LATENT), tl.float32)
        for tile_begin in range(first * schedule.TILE, tl.minimum(end * schedule.TILE, length), TILE_N):
            state, acc = _absorb_tile(state, acc, q_latent, q_rope, keys, sequence, tile_begin, length, limits, head_kv,
                                      scale_log2, TILE_N, LATENT, ROPE)  # fmt: skip
        if schedule.is_whole(sequence, begin, begin_tile, last, end_tile):
            _store_final(out, lse, state, acc, sinks, sequence, tokens, heads, row_exists, dims, LSE_WITH_SINKS)
        else:
            inverse, row_lse = softmax.finish(state)
            slot = schedule.partial_slot(part, first)
            row = (slot.to(tl.int64) * num_heads_kv + head_kv) * num_rows + rows
            copies = row_lse[:, None] + tl.zeros((1, LSE_COPIES), tl.float32)
            tl.store(partial_lse + row[:, None] * LSE_COPIES + tl.arange(0, LSE_COPIES)[None, :], copies,
                     mask=row_exists[:, None])  # fmt: skip
            tl.store(partial_out + row[:, None] * LATENT + dims[None, :], acc * inverse[:, None], mask=row_exists[:, None])


@triton.jit
def _store_final(out, lse, state, acc, sinks, sequence, tokens, heads, row_exists, dims, LSE_WITH_SINKS: tl.constexpr):
    """Columns `dims` of rows of out, and lse, from sums over all keys; sinks may be None."""
    inverse, row_lse = softmax.finish(state)
    if sinks is not None:
        state, correction = softmax.absorb_sink(state, tl.load(sinks + heads, mask=row_exists, other=NEG_INF).to(tl.float32))
        inverse, lse_with_sink = softmax.finish(state)
        acc = acc * correction[:, None]
        if LSE_WITH_SINKS:
            row_lse = lse_with_sink
    sequence = sequence.to(tl.int64)
    lse_ptrs = lse.ptr + sequence * lse.batch_stride + heads * lse.head_stride + tokens * lse.row_stride
    tl.store(lse_ptrs, row_lse, mask=row_exists)
    out_ptrs = out.ptr + sequence * out.batch_stride + tokens * out.row_stride + heads * out.head_stride
    tl.store(out_ptrs[:, None] + dims[None, :], (acc * inverse[:, None]).to(out.ptr.dtype.element_ty),
             mask=row_exists[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def merge(
    out, lse, partial_out, partial_lse, table, sinks, num_rows, num_heads_kv, num_parts, BY_PART: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr,
    LSE_WITH_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS rows and COLUMNS columns of one sequence whose keys were split over parts; others have no work.

    CHUNK partial results are read at a time. BY_PART: a program looks at the sequence that the end of its part cuts, if it
    begins there; else at a sequence. DEPENDENT: may begin before the kernel ends that leaves the partial results.
    """
    sequence = tl.program_id(1)
    wanted = True
    if BY_PART:
        sequence = tl.load(table + 2 * (tl.program_id(1) + 1))
        wanted = tl.load(table + 2 * (tl.program_id(1) + 1) + 1) > 0
    first_part = tl.load(table + 2 * (num_parts + 1 + sequence), mask=wanted, other=0)
    last_part = tl.load(table + 2 * (num_parts + 1 + sequence) + 1, mask=wanted, other=0)
    if BY_PART:
        # A sequence that a part before began belongs to that part
        last_part = tl.where(first_part == tl.program_id(1), last_part, first_part)
    if DEPENDENT:
        chain.wait()
    if last_part > first_part:
        total_rows = num_heads_kv * num_rows
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        row_exists = rows < total_rows
        column = tl.program_id(2) * COLUMNS
        first, rest, step = schedule.slots_of(first_part)
        merged, row_lse = merge_rows(
            partial_out + rows * LATENT, partial_lse + rows * LSE_COPIES, total_rows * LATENT, total_rows * LSE_COPIES, first,
            rest, step, last_part - first_part + 1, row_exists, column, ROWS, CHUNK, LATENT, COLUMNS, 1,
        )  # fmt: skip
        head_kv, row = rows // num_rows, rows % num_rows
        tokens, heads = row // GROUP_SIZE, head_kv * GROUP_SIZE + row % GROUP_SIZE
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=row_exists, other=NEG_INF).to(tl.float32)
            state = softmax.OnlineSoftmax(row_lse * LOG2_E, tl.where(row_lse == NEG_INF, 0.0, 1.0))
            state, correction = softmax.absorb_sink(state, sink[None, :])
            inverse, lse_with_sink = softmax.finish(state)
            merged = merged * (inverse * correction)[:, :, None]
            if LSE_WITH_SINKS:
                row_lse = lse_with_sink
        store_rows(merged, row_lse, head_ptr(out, sequence, tokens, heads), head_ptr(lse, sequence, tokens, heads), row_exists,
                   column, LATENT)  # fmt: skip


# Of those with little enough shared memory the first is taken that has all rows of a problem, or 64 of more; if none has, the
# first. For 16 rows (64, 32, 8, 1) is no choice: compiled for sm_80 it spills 504 bytes, (16, 32, 4, 1) none.
CONFIGS = (
    TileConfig(16, 64, 4, 2),
    TileConfig(16, 32, 4, 1),
    TileConfig(64, 64, 8, 2),
    TileConfig(64, 32, 8, 1),
)
# Numbers of partial results that a program of `merge` reads at once, and its warps, by how many a sequence has. With 1 hardly
# one is cut: few programs, that have nothing to do. What was tried is in docs/kernels/mla.md
MERGE_PROGRAMS = {1: (8192, 4), 2: (1024, 1), 4: (1024, 1), 8: (4096, 4), 16: (4096, 4), 32: (1024, 1), 64: (8192, 4),
                  128: (8192, 4)}  # fmt: skip


def shared_bytes(problem, config) -> int:
    """Estimate of a block's shared memory: the queries, num_stages of keys, and the probabilities."""
    row = problem.head_dim * problem.dtype.itemsize
    return (config.tile_m + config.num_stages * config.tile_n) * row + 2 * config.tile_m * config.tile_n


def config_of(problem, device) -> TileConfig | None:
    """The tile of a problem, or None where none fits."""
    fitting = [config for config in CONFIGS if shared_bytes(problem, config) <= device.smem_bytes]
    if device.sm >= 100:
        # Triton keeps more than our tiles in shared memory there: 345 KiB for (64, 64, 8, 2)
        fitting = [config for config in fitting if config.num_stages == 1]
    enough = [config for config in fitting if config.tile_m >= min(problem.num_rows, 64)]
    return next(iter(enough or fitting), None)


def refuses(problem, device) -> str | None:
    """Why these kernels do not take a problem, or None."""
    if device.arch == "cpu":
        if "portable" not in settings.preferred_tiers():
            return "needs a GPU, or FLASHTILE_TIER=portable"
        if problem.dtype != torch.float16:
            return f"Triton's interpreter multiplies float16 here, not {problem.dtype}"
        return None
    if device.sm < 80:
        return f"needs sm_80 or newer, the device is {device.arch}"
    if problem.fp8 and device.sm < 89:
        return f"needs sm_89 for packed caches (e4m3), the device is {device.arch}"
    if config_of(problem, device) is None:
        return f"no tile fits in {device.smem_bytes >> 10} KiB of shared memory"
    return None


class Tensors(NamedTuple):
    """Of one call, as its launches take them; None where one is off."""

    q: Any
    # The cache, or what a packed one holds beside each other
    latent: Any
    scales: Any
    rope: Any
    # cache_seqlens or topk_length, and block_table or indices
    lengths: Any
    entries: Any
    sinks: Any
    # of schedule.py
    table: Any
    out: Any
    # (batch, seqlen_q, heads): heads of a token side by side, as kernels write them
    lse: Any
    # fp32: (slots, num_heads_kv, num_rows, 512), and (slots, num_heads_kv, num_rows) behind it
    partial: Any
    # Indices in the order of order.py
    ordered: Any


def rows_of(x) -> Rows:
    """Pointer and strides of (sequences, tokens, heads, dim), or (sequences, tokens, heads) where a row is one number."""
    return Rows(x, *x.stride()[:3])


def sequences_of(problem, x) -> Rows:
    """Rows of (batch, seqlen_q, heads, ...); with indices each query token is a sequence of its own."""
    if not problem.sparse:
        return rows_of(x)
    # The tensor itself as pointer: `Launches` knows it
    return Rows(x, *x.view(problem.num_sequences, 1, *x.shape[2:]).stride()[:3])


def _is_viewable(x, *shape) -> bool:
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def _about(parts) -> int:
    """The power of two above, but for a few more than one, which take a second round."""
    below = 1 << max(parts, 1).bit_length() - 1
    return min(below if 8 * parts <= 9 * below else 2 * below, max(MERGE_PROGRAMS))


class Call:
    """Schedule if a call brings none, order, decode, merge: for calls of one kind (see `Launches`).

    What stays the same from call to call is kept. config: TileConfig.
    """

    # Whether the merge may be loaded while the kernel still runs that leaves it partial results
    DEPENDENT = False

    def __init__(self, problem, config, operands):
        self.problem, self.config = problem, config
        q, table = operands.q, operands.schedule
        self.makes_table = table is None
        if self.makes_table:
            shape = table_shape(problem.num_sequences, problem.num_rows, problem.num_heads_kv, q.device)
        else:
            shape = table.shape
        self.num_parts = schedule.num_parts_of(shape, problem.num_sequences)
        self.new_table = fresh(shape, torch.int32)
        out_shape = problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v
        self.is_empty = 0 in out_shape
        self.new_out, self.new_lse = fresh(out_shape), fresh(out_shape[:3], torch.float32)
        # One part cuts nothing
        slots = 2 * self.num_parts if self.num_parts > 1 else 0
        self.partial_rows = slots * problem.total_rows
        self.new_partial = fresh((self.partial_rows * (problem.head_dim_v + LSE_COPIES.value),), torch.float32)
        # What bounds the keys of a sequence
        self.max_length = problem.topk if problem.sparse else operands.block_table.shape[1] * problem.page_size
        self.copies_q = not self.is_empty and self.must_copy(q)
        orders = problem.sparse and self.orders_indices()
        self.new_ordered = fresh((problem.num_sequences, problem.topk), torch.int32) if orders else None
        self.copies_indices = problem.sparse and not _is_viewable(operands.indices, problem.num_sequences, problem.topk)
        self.launches = Launches(self.start)

    def __call__(self, operands):
        """out and lse as `mla_decode` describes them."""
        q = operands.q
        out, lse = self.new_out(q), self.new_lse(q)
        if not self.is_empty:
            entries, lengths = operands.block_table, operands.cache_seqlens
            if self.problem.sparse:
                entries, lengths = operands.indices, operands.topk_length
                if self.copies_indices:
                    entries = entries.contiguous()
            table = self.new_table(q) if self.makes_table else operands.schedule
            if self.copies_q:
                q = q.clone(memory_format=torch.contiguous_format)
            self.launches.run(q, *self.parts_of(operands.kv_cache), lengths, entries, operands.sinks, table, out, lse,
                              self.new_partial(q) if self.partial_rows else None,
                              self.new_ordered(q) if self.new_ordered else None)  # fmt: skip
        return out, lse.transpose(1, 2)

    def start(self, launch, *tensors):
        x, problem = Tensors(*tensors), self.problem
        if self.makes_table:
            schedule.launch(x.table, x.lengths, fixed_length=self.max_length, num_sequences=problem.num_sequences,
                            seqlen_q=problem.seqlen_q if problem.sparse else 1, total_rows=problem.total_rows,
                            launch=launch)  # fmt: skip
        if x.ordered is not None:
            order.launch(launch, x.entries, x.lengths, x.ordered, problem.num_pages * problem.page_size, problem.seqlen_q)
            x = x._replace(entries=x.ordered)
        # One part has no partial results: any pointer will do
        partial_out, partial_lse = x.lse, x.lse
        if x.partial is not None:
            partial_out, partial_lse = x.partial, x.partial[self.partial_rows * problem.head_dim_v :]
        self.start_decode(launch, x, partial_out, partial_lse)
        if x.partial is not None:
            self.start_merge(launch, x, partial_out, partial_lse)

    def keys_of(self, latent, scales, rope, x) -> tuple:
        """What a kernel makes Keys of; latent, scales, rope: Rows or None."""
        problem = self.problem
        entries = x.entries.view(problem.num_sequences, problem.topk) if problem.sparse else x.entries
        block_table, indices = (None, x.entries) if problem.sparse else (x.entries, None)
        page_size, rows = problem.page_size, (latent, scales, rope)
        if problem.sparse and all(x is None or x.batch_stride == page_size * x.row_stride for x in rows):
            # Tokens lie side by side: as pages of one, so that no index is divided
            page_size, rows = 1, [x and x._replace(batch_stride=x.row_stride) for x in rows]
        return (*rows, page_size, block_table, indices), problem.num_pages * problem.page_size, entries.stride(0)

    def start_merge(self, launch, x, partial_out, partial_lse):
        problem, num_parts = self.problem, self.num_parts
        by_part = problem.num_sequences > num_parts
        # As many partial results as a sequence has, where all are as long; those that have more take several rounds. Where
        # there are fewer parts than sequences, about all cut one in two
        parts = 2
        if not by_part:
            parts = _about(schedule.most_parts(self.max_length, problem.num_sequences, num_parts, problem.total_rows))
        numbers, warps = MERGE_PROGRAMS[parts]
        chunk = max(parts, 2)
        columns = min(problem.head_dim_v, numbers // chunk)
        rows = numbers // (chunk * columns)
        grid = (triton.cdiv(problem.total_rows, rows), num_parts if by_part else problem.num_sequences,
                problem.head_dim_v // columns)  # fmt: skip
        constexprs = {"BY_PART": by_part, "ROWS": rows, "CHUNK": chunk, "COLUMNS": columns, "LATENT": problem.head_dim_v,
                      "GROUP_SIZE": problem.group_size, "LSE_WITH_SINKS": problem.lse_with_sinks,
                      "DEPENDENT": self.DEPENDENT}  # fmt: skip
        launch(
            merge, grid,
            (sequences_of(problem, x.out), sequences_of(problem, x.lse), partial_out, partial_lse, x.table, x.sinks,
             problem.num_rows, problem.num_heads_kv, num_parts),
            constexprs, num_warps=warps, **chain.after(self.DEPENDENT),
        )  # fmt: skip

    # Of this tier's kernel; that of another has its own

    def must_copy(self, q) -> bool:
        """Whether the kernel can't read the queries where they lie."""
        problem = self.problem
        return problem.sparse and not _is_viewable(q, problem.num_sequences, 1, *q.shape[2:])

    def orders_indices(self) -> bool:
        """Whether indices are put in the order of order.py first."""
        return False

    def parts_of(self, kv_cache):
        """(latent, scales, rope) of Tensors."""
        if self.problem.fp8:
            return cache.split_fp8(kv_cache)
        return kv_cache, None, kv_cache[..., self.problem.head_dim_v :]

    def start_decode(self, launch, x, partial_out, partial_lse):
        problem, config = self.problem, self.config
        keys = self.keys_of(*(None if part is None else rows_of(part) for part in (x.latent, x.scales, x.rope)), x)
        constexprs = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "LATENT": problem.head_dim_v,
                      "ROPE": problem.head_dim - problem.head_dim_v, "GROUP_SIZE": problem.group_size,
                      "SEQUENCES_PER_LENGTH": problem.seqlen_q if problem.sparse else 1, "IS_CAUSAL": problem.causal,
                      "LSE_WITH_SINKS": problem.lse_with_sinks}  # fmt: skip
        launch(
            decode, (triton.cdiv(problem.num_rows, config.tile_m) * problem.num_heads_kv, self.num_parts),
            (sequences_of(problem, x.q), sequences_of(problem, x.out), sequences_of(problem, x.lse), *keys, partial_out,
             partial_lse, x.table, x.lengths, x.sinks, problem.softmax_scale, problem.num_sequences, problem.num_rows,
             problem.num_heads_kv, problem.seqlen_q, self.max_length),
            constexprs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


bind = Call
