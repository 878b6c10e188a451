"""Attention over a key-value cache: split-KV decoding, and prefill of any length, in one Triton kernel.

The rows of a tile are the queries of all heads of a group, token after token, so that a key is read once for all of them:

    row r of a key-value head  =  token r // GROUP_SIZE, query head r % GROUP_SIZE

Work is counted in key tiles of such row tiles. BALANCED programs take equal shares of all work, one after the other through
row tiles and sequences, whatever the lengths are; each computes from the lengths in device memory where its share lies, so
nobody waits for the host. A share's row tiles are whole but for the first and the last; these leave partial results in one of
two slots of their program, which `merge_parts` merges. With a fixed number of splits each row tile has that many programs,
and its result depends on its own sequence alone.

A row tile reads q once and then its keys and values, in tiles of TILE_N slots: of a row of the cache, of one page where pages
are whole tiles, else slot by slot through the block table.

What it reaches on an H200 is in benchmarks/results/nvidia-h200/decode.json: with 2 GB of keys and values more than the rate of
a copy, with 0.5 GB 0.87 to 0.93 of it, on ragged lengths (1.7 GB) 0.85. Some 10 us are fixed: the start of two kernels, the
way from the lengths to the first keys, the merge. Tried there (not recorded), as time over 64 keys by 4 warps, 3 stages and two
programs to an SM: 4 stages 1.00 to 1.06; 2 warps 1.01 to 1.15; 8 warps 1.01 to 1.27; 128 keys by 8 warps, one program to an SM,
0.97 to 1.09, 1.30 on ragged lengths; 32 keys and three programs 0.98 to 1.15, four programs 1.02 to 1.35.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention; equal shares: Osama et al. 2023, Stream-K.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile import hardware
from flashtile.device import cache, masks, scores, softmax
from flashtile.device.masks import Window
from flashtile.device.numerics import NEG_INF, dot
from flashtile.device.scores import ScoreParams
from flashtile.device.tensors import head_ptr, tile_offsets
from flashtile.portable import append
from flashtile.portable.arguments import layout_of, rows_of
from flashtile.portable.combine import merge_row
from flashtile.portable.launch import Kernel
from flashtile.tiles import padded_dim

# Programs of the interpreter: enough to split what its tests have
INTERPRETED_SMS = 4


class Partial(NamedTuple):
    """fp32 (slots, TILE_M, HEAD_DIM_V) and (slots, TILE_M); None where nothing is split."""

    out: Any
    lse: Any


class Descales(NamedTuple):
    """(batch, num_heads_kv), fp32, or None."""

    q: Any
    k: Any
    v: Any


class Part(NamedTuple):
    """Key tiles [begin, end) of row tile `m_tile` of one key-value head; counted from the first that the sequence sees."""

    batch: Any
    head: Any
    m_tile: Any
    begin: Any
    end: Any


class Shares(NamedTuple):
    """Of each sequence, (BATCH_BLOCK,): where its work ends in all work, its key tiles and row tiles; and a program's share."""

    work_ends: Any
    tiles: Any
    row_tiles: Any
    total: Any
    share: Any


@triton.jit
def _key_tiles(lengths, window, TILE_N: tl.constexpr):
    """(first tile, number of tiles) of the keys that some query of a sequence sees; at least one, which may be empty."""
    first = lengths.seqlen_k * 0
    if window.left is not None:
        first = tl.maximum(lengths.seqlen_k - lengths.seqlen_q - window.left, 0) // TILE_N
    return first, tl.maximum(tl.cdiv(lengths.seqlen_k, TILE_N) - first, 1)


@triton.jit
def _shares(layout, window, seqlen_q, num_sequences, num_heads_kv, num_programs, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr,
            TILE_N: tl.constexpr, BATCH_BLOCK: tl.constexpr):  # fmt: skip
    sequences = tl.arange(0, BATCH_BLOCK)
    mask = sequences < num_sequences
    lengths = cache.load_cache_lengths(layout, sequences, mask, seqlen_q)
    _, tiles = _key_tiles(lengths, window, TILE_N)
    row_tiles = tl.where(mask, tl.cdiv(lengths.seqlen_q * GROUP_SIZE, TILE_M) * num_heads_kv, 0)
    work = row_tiles * tiles
    total = tl.sum(work, 0)
    return Shares(tl.cumsum(work, 0), tiles, row_tiles, total, tl.cdiv(total, num_programs))


@triton.jit
def _at(vector, index, BATCH_BLOCK: tl.constexpr):
    """vector[index]."""
    return tl.sum(tl.where(tl.arange(0, BATCH_BLOCK) == index, vector, 0), 0)


@triton.jit
def _locate(shares, position, num_heads_kv, BATCH_BLOCK: tl.constexpr):
    """The row tile in which a position of all work lies, from there to its end."""
    batch = tl.sum((shares.work_ends <= position).to(tl.int32), 0)
    # A position behind all work is looked up too, and not used
    tiles = tl.maximum(_at(shares.tiles, batch, BATCH_BLOCK), 1)
    row_tiles = _at(shares.row_tiles, batch, BATCH_BLOCK)
    within = position - (_at(shares.work_ends, batch, BATCH_BLOCK) - row_tiles * tiles)
    per_head = tl.maximum(row_tiles // num_heads_kv, 1)
    row_tile = within // tiles
    return Part(batch, row_tile // per_head, row_tile % per_head, within % tiles, tiles)


@triton.jit
def _load_keys(x, row, page, head, col_begin, lengths, PAGE_SIZE: tl.constexpr, WHOLE_PAGES: tl.constexpr,
               TILE_N: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """(TILE_N, BLOCK_DIM) of k or v from key col_begin on; zeros past the sequence. page: `_pages_of_tile`."""
    cols = col_begin + tl.arange(0, TILE_N)
    mask = (cols < lengths.seqlen_k)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    if PAGE_SIZE == 0:
        first = (lengths.start_k + col_begin).to(tl.int64)
        ptr = x.ptr + row.to(tl.int64) * x.batch_stride + first * x.row_stride + head * x.head_stride
        return tl.load(ptr + tile_offsets(tl.arange(0, TILE_N), x.row_stride, DIM, BLOCK_DIM, WIDE), mask=mask, other=0.0)
    elif WHOLE_PAGES:
        first = (col_begin % PAGE_SIZE).to(tl.int64)
        ptr = x.ptr + page.to(tl.int64) * x.batch_stride + first * x.row_stride + head * x.head_stride
        return tl.load(ptr + tile_offsets(tl.arange(0, TILE_N), x.row_stride, DIM, BLOCK_DIM, WIDE), mask=mask, other=0.0)
    else:
        slots = lengths.start_k + cols
        rows = page.to(tl.int64) * x.batch_stride + (slots % PAGE_SIZE).to(tl.int64) * x.row_stride
        ptrs = x.ptr + head * x.head_stride + rows[:, None] + tl.arange(0, BLOCK_DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _pages_of_tile(layout, batch, n_tile, end, lengths, PAGE_SIZE: tl.constexpr, WHOLE_PAGES: tl.constexpr,
                   TILE_N: tl.constexpr):  # fmt: skip
    """The page of a tile, or of each of its keys."""
    if PAGE_SIZE == 0:
        return 0
    elif WHOLE_PAGES:
        return cache.load_pages(layout, batch, n_tile * TILE_N // PAGE_SIZE, n_tile < end)
    else:
        cols = n_tile * TILE_N + tl.arange(0, TILE_N)
        mask = (cols < lengths.seqlen_k) & (n_tile < end)
        return cache.load_pages(layout, batch, (lengths.start_k + cols) // PAGE_SIZE, mask)


@triton.jit
def _attend_part(
    part, slot, whole, q, k, v, out, lse, partial, layout, window, score_params, sinks, descales, seqlen_q, num_sequences,
    num_heads_kv, GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WHOLE_PAGES: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One part of a row tile's keys, to out and lse if it is all of them, else to a slot of the partial results."""
    lengths = cache.load_cache_lengths(layout, part.batch, part.batch < num_sequences, seqlen_q)
    first_tile, _ = _key_tiles(lengths, window, TILE_N)
    rows = part.m_tile * TILE_M + tl.arange(0, TILE_M)
    tokens = rows // GROUP_SIZE
    heads = part.head * GROUP_SIZE + rows % GROUP_SIZE
    first_token = part.m_tile * TILE_M // GROUP_SIZE
    visible = masks.key_range(first_token, lengths, window, TOKENS, TILE_N)
    begin = tl.maximum(first_tile + part.begin, visible.begin)
    end = tl.minimum(first_tile + part.end, visible.end)

    row_mask = tokens < lengths.seqlen_q
    q_rows = (lengths.start_q + tokens).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    q_ptrs = q.ptr + part.batch.to(tl.int64) * q.batch_stride + (q_rows * q.row_stride + heads * q.head_stride)[:, None]
    # (TILE_M, BLOCK_D); fp8 queries are multiplied as those of out
    q_tile = tl.load(q_ptrs + dims[None, :], mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    dtype = out.ptr.dtype.element_ty
    q_tile = q_tile.to(dtype)

    scale = score_params.scale
    head_kv = part.batch * num_heads_kv + part.head
    if descales.q is not None:
        scale = scale * tl.load(descales.q + head_kv)
    if descales.k is not None:
        scale = scale * tl.load(descales.k + head_kv)
    score_params = ScoreParams(scale, score_params.softcap, score_params.alibi_slopes, score_params.alibi_batch_stride,
                               score_params.prescaled)  # fmt: skip
    slope = 0.0
    if score_params.alibi_slopes is not None:
        slope = tl.load(score_params.alibi_slopes + part.batch * score_params.alibi_batch_stride + heads)[:, None]

    if PAGE_SIZE == 0:
        cache_row = cache.cache_row(layout, part.batch)
    else:
        cache_row = part.batch
    state = softmax.OnlineSoftmax(tl.full((TILE_M,), NEG_INF, tl.float32), tl.zeros((TILE_M,), tl.float32))
    acc = tl.zeros((TILE_M, BLOCK_DV), tl.float32)
    page = _pages_of_tile(layout, part.batch, begin, end, lengths, PAGE_SIZE, WHOLE_PAGES, TILE_N)
    for n_tile in tl.range(begin, end):
        # Read a step ahead: the address of the next tile is known when its load begins
        next_page = _pages_of_tile(layout, part.batch, n_tile + 1, end, lengths, PAGE_SIZE, WHOLE_PAGES, TILE_N)
        col_begin = n_tile * TILE_N
        cols = col_begin + tl.arange(0, TILE_N)
        k_tile = _load_keys(k, cache_row, page, part.head, col_begin, lengths, PAGE_SIZE, WHOLE_PAGES, TILE_N, HEAD_DIM,
                            BLOCK_D, WIDE)  # fmt: skip
        # (TILE_M, TILE_N)
        logits = dot(q_tile, k_tile.to(dtype).T)
        logits = scores.logits(logits, tokens[:, None], cols[None, :], lengths, slope, score_params)
        logits = tl.where(masks.visible_keys(tokens[:, None], cols[None, :], lengths, window), logits, NEG_INF)
        state, p, correction = softmax.update(state, logits, scores.scale_log2(score_params), True)
        v_tile = _load_keys(v, cache_row, page, part.head, col_begin, lengths, PAGE_SIZE, WHOLE_PAGES, TILE_N,
                            HEAD_DIM_V, BLOCK_DV, WIDE)  # fmt: skip
        acc = dot(p.to(dtype), v_tile.to(dtype), acc * correction[:, None])
        page = next_page

    if sinks is not None:
        # The sink is one logit more of the first part
        sink = tl.load(sinks + heads).to(tl.float32)
        state, correction = softmax.absorb_sink(state, tl.where(part.begin == 0, sink, NEG_INF))
        acc = acc * correction[:, None]
    inverse, row_lse = softmax.finish(state)
    if descales.v is not None:
        inverse = inverse * tl.load(descales.v + head_kv)
    acc = acc * inverse[:, None]
    dims_v = tl.arange(0, BLOCK_DV)
    mask = row_mask[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    if whole:
        out_rows = part.batch.to(tl.int64) * out.batch_stride + q_rows * out.row_stride + heads * out.head_stride
        tl.store(out.ptr + out_rows[:, None] + dims_v[None, :], acc.to(dtype), mask=mask)
        if lse is not None:
            lse_rows = part.batch.to(tl.int64) * lse.batch_stride + q_rows * lse.row_stride + heads * lse.head_stride
            tl.store(lse.ptr + lse_rows, row_lse, mask=row_mask)
    else:
        places = slot.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
        tl.store(partial.lse + places, row_lse, mask=row_mask)
        if (begin < end) | (part.begin == 0):
            tl.store(partial.out + places[:, None] * HEAD_DIM_V + dims_v[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["seqlen_q", "num_sequences", "num_splits", "num_tiles"])
def decode_attention(
    q, k, v, out, lse, partial, layout, window, score_params, sinks, descales, seqlen_q, num_sequences, num_heads_kv,
    num_tiles, num_splits, GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WHOLE_PAGES: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, BALANCED: tl.constexpr, BATCH_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    HAS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """q, k, v, out: Rows, those of a paged cache with a page for a batch entry. lse: Rows or None. partial: Partial.

    num_tiles: row tiles of the longest sequence. num_splits: parts of a row tile, or without splits 1; not with BALANCED.
    DEPENDENT: may begin before the kernel before it (`append_rows`) ends, which changes no lengths. HAS_DEPENDENT: the kernel
    after it (`merge_parts`) may begin.
    """
    program = tl.program_id(0)
    if HAS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if BALANCED:
        num_programs = tl.num_programs(0)
        shares = _shares(layout, window, seqlen_q, num_sequences, num_heads_kv, num_programs, GROUP_SIZE, TILE_M, TILE_N,
                         BATCH_BLOCK)  # fmt: skip
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        position = program * shares.share
        stop = tl.minimum(position + shares.share, shares.total)
        while position < stop:
            rest = _locate(shares, position, num_heads_kv, BATCH_BLOCK)
            end = tl.minimum(rest.end, rest.begin + stop - position)
            part = Part(rest.batch, rest.head, rest.m_tile, rest.begin, end)
            slot = tl.where(rest.begin > 0, program, num_programs + program)
            whole = end - rest.begin == rest.end
            _attend_part(part, slot, whole, q, k, v, out, lse, partial, layout, window, score_params, sinks, descales,
                         seqlen_q, num_sequences, num_heads_kv, GROUP_SIZE, PAGE_SIZE, WHOLE_PAGES, TILE_M, TILE_N, HEAD_DIM,
                         HEAD_DIM_V, BLOCK_D, BLOCK_DV, TOKENS, WIDE)  # fmt: skip
            position += end - rest.begin
    else:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        row_tile = program // num_splits
        m_tile = row_tile % num_tiles
        if window.right is not None:
            # the longest tiles first
            m_tile = num_tiles - 1 - m_tile
        head = row_tile // num_tiles % num_heads_kv
        batch = row_tile // (num_tiles * num_heads_kv)
        lengths = cache.load_cache_lengths(layout, batch, batch < num_sequences, seqlen_q)
        if m_tile * TILE_M < lengths.seqlen_q * GROUP_SIZE:
            _, tiles = _key_tiles(lengths, window, TILE_N)
            split = program % num_splits
            share = tl.cdiv(tiles, num_splits)
            part = Part(batch, head, m_tile, split * share, tl.minimum(tiles, (split + 1) * share))
            _attend_part(part, program, partial.out is None, q, k, v, out, lse, partial, layout, window, score_params, sinks,
                         descales, seqlen_q, num_sequences, num_heads_kv, GROUP_SIZE, PAGE_SIZE, WHOLE_PAGES, TILE_M, TILE_N,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, TOKENS, WIDE)  # fmt: skip


@triton.jit(do_not_specialize=["seqlen_q", "num_sequences", "num_splits", "num_tiles", "num_programs"])
def merge_parts(
    out, lse, partial, layout, window, seqlen_q, num_sequences, num_heads_kv, num_tiles, num_splits, num_programs,
    GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BALANCED: tl.constexpr, BATCH_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (row tile, its row) merge the parts of a row tile. Arguments of `decode_attention`.

    With BALANCED a program is there for the border between two shares: for the row tile that the first of its borders cuts.
    """
    program = tl.program_id(0)
    if BALANCED:
        shares = _shares(layout, window, seqlen_q, num_sequences, num_heads_kv, num_programs, GROUP_SIZE, TILE_M, TILE_N,
                         BATCH_BLOCK)  # fmt: skip
        border = (program + 1) * shares.share
        place = _locate(shares, tl.minimum(border, shares.total), num_heads_kv, BATCH_BLOCK)
        batch, head, m_tile = place.batch, place.head, place.m_tile
        rest = program
        first = num_programs + program
        parts = (border - place.begin + place.end - 1) // shares.share - program + 1
        is_mine = (border < shares.total) & (place.begin > 0) & (place.begin <= shares.share)
    else:
        m_tile = program % num_tiles
        if window.right is not None:
            m_tile = num_tiles - 1 - m_tile
        head = program // num_tiles % num_heads_kv
        batch = program // (num_tiles * num_heads_kv)
        first = program * num_splits
        rest = first
        parts = num_splits
        is_mine = batch < num_sequences
    row = tl.program_id(1)
    lengths = cache.load_cache_lengths(layout, batch, is_mine, seqlen_q)
    token = (m_tile * TILE_M + row) // GROUP_SIZE
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if is_mine & (token < lengths.seqlen_q):
        head_q = head * GROUP_SIZE + (m_tile * TILE_M + row) % GROUP_SIZE
        merged, merged_lse = merge_row(partial.out + row * HEAD_DIM_V, partial.lse + row, TILE_M * HEAD_DIM_V, TILE_M, first,
                                       rest, parts, HEAD_DIM_V, BLOCK_DV)  # fmt: skip
        dims = tl.arange(0, BLOCK_DV)
        row_q = (lengths.start_q + token).to(tl.int64)
        out_ptr = head_ptr(out, batch, row_q, head_q)
        tl.store(out_ptr + dims, merged.to(out.ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)
        if lse is not None:
            tl.store(head_ptr(lse, batch, row_q, head_q), merged_lse)


class Call:
    """Append, attend, merge: three launches at most. What stays the same from call to call is kept, compiled kernels too.

    Calls must have the shapes, strides, dtypes and alignments of operands. config: tiles.DecodeConfig.
    """

    def __init__(self, problem, config, operands):
        self.problem = problem
        device = hardware.detect(operands.q.device)
        self.plan = plan_parts(problem, config, device.num_sms or INTERPRETED_SMS)
        self.append = append.Call(problem, operands) if problem.appends else None
        self.out_shape = (*operands.q.shape[:-1], problem.head_dim_v)
        self.is_empty = 0 in self.out_shape
        self.partial_rows = self.plan.slots * config.tile_m
        self.shape = (problem.seqlen_q, problem.batch, problem.num_heads_kv, self.plan.num_tiles, self.plan.num_splits)
        page_size = problem.page_size or 0
        # Programmatic dependent launch
        dependent = device.sm >= 90
        merge_constexprs = {
            "GROUP_SIZE": problem.group_size, "TILE_M": config.tile_m, "TILE_N": config.tile_n,
            "HEAD_DIM_V": problem.head_dim_v, "BLOCK_DV": padded_dim(problem.head_dim_v, 2), "BALANCED": self.plan.balanced,
            "BATCH_BLOCK": triton.next_power_of_2(problem.batch), "DEPENDENT": dependent,
        }  # fmt: skip
        constexprs = merge_constexprs | {
            "PAGE_SIZE": page_size, "HEAD_DIM": problem.head_dim, "BLOCK_D": padded_dim(problem.head_dim, 2),
            "WHOLE_PAGES": page_size > 0 and page_size % config.tile_n == 0 and not problem.has_leftpad,
            "TOKENS": tokens_of_tile(config.tile_m, problem.group_size), "WIDE": problem.wide_rows,
            "DEPENDENT": dependent and problem.appends, "HAS_DEPENDENT": dependent and self.plan.slots > 0,
        }  # fmt: skip
        row_tiles = problem.batch * problem.num_heads_kv * self.plan.num_tiles
        merge_grid = (self.plan.num_programs if self.plan.balanced else row_tiles,
                      min(config.tile_m, problem.seqlen_q * problem.group_size))  # fmt: skip
        self.decode = Kernel(decode_attention, (self.plan.num_programs,), constexprs, config.num_warps, config.num_stages,
                             constexprs["DEPENDENT"])  # fmt: skip
        self.merge = Kernel(merge_parts, merge_grid, merge_constexprs, 4, 1, dependent)

    def __call__(self, operands):
        """out and lse (None unless asked for) as `flashtile.attention_with_kvcache` describes them."""
        problem, q = self.problem, operands.q
        out = q.new_empty(self.out_shape, dtype=problem.out_dtype)
        lse = q.new_empty(problem.lse_shape, dtype=torch.float32) if problem.return_lse else None
        if problem.varlen:
            # Rows of no sequence
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        if self.append is not None:
            q = self.append(operands)
        if self.is_empty:
            return out, lse
        partial = Partial(None, None)
        if self.partial_rows:
            workspace = q.new_empty(self.partial_rows * (problem.head_dim_v + 1), dtype=torch.float32)
            partial = Partial(workspace[self.partial_rows :], workspace)
        self.decode(
            (q, operands.k_cache, operands.v_cache, out, lse, *partial, *operands[5:11], operands.alibi_slopes, operands.sinks,
             operands.q_descale, operands.k_descale, operands.v_descale),
            lambda: self.decode_arguments(operands, q, out, lse, partial),
        )  # fmt: skip
        if self.partial_rows:
            self.merge((out, lse, *partial, *operands[5:11]), lambda: self.merge_arguments(operands, out, lse, partial))
        return out, lse

    def decode_arguments(self, operands, q, out, lse, partial):
        problem, slopes = self.problem, operands.alibi_slopes
        score_params = ScoreParams(
            problem.softmax_scale, problem.softcap or None, slopes,
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            # The scale acts before the maximum where it may be negative
            None if problem.softmax_scale > 0 and not problem.has_descale else 1,
        )  # fmt: skip
        return (
            rows_of(q), rows_of(operands.k_cache), rows_of(operands.v_cache), rows_of(out),
            None if lse is None else rows_of(lse, lse=True), partial, layout_of(problem, operands), Window(*problem.window),
            score_params, operands.sinks, Descales(operands.q_descale, operands.k_descale, operands.v_descale), *self.shape,
        )  # fmt: skip

    def merge_arguments(self, operands, out, lse, partial):
        return (rows_of(out), None if lse is None else rows_of(lse, lse=True), partial, layout_of(self.problem, operands),
                Window(*self.problem.window), *self.shape, self.plan.num_programs)  # fmt: skip


def tokens_of_tile(tile_m, group_size) -> int:
    """The most tokens whose rows stand in one tile."""
    if tile_m % group_size == 0:
        return tile_m // group_size
    return 1 if group_size % tile_m == 0 else (tile_m + group_size - 2) // group_size + 1


class PartsPlan(NamedTuple):
    """How row tiles are divided among programs. slots: of partial results, 0 where no row tile is split."""

    balanced: bool
    num_programs: int
    num_tiles: int
    num_splits: int
    slots: int


def plan_parts(problem, config, num_sms) -> PartsPlan:
    """From shapes alone: lengths are on the device."""
    num_tiles = -(-problem.seqlen_q * problem.group_size // config.tile_m)
    row_tiles = problem.batch * problem.num_heads_kv * num_tiles
    if problem.num_splits:
        slots = row_tiles * problem.num_splits if problem.num_splits > 1 else 0
        return PartsPlan(False, row_tiles * problem.num_splits, num_tiles, problem.num_splits, slots)
    resident = num_sms * config.programs_per_sm
    most = row_tiles * max(1, -(-problem.capacity // config.tile_n))
    if num_tiles > 1 and row_tiles >= 2 * resident or most >= 2**31:
        return PartsPlan(False, row_tiles, num_tiles, 1, 0)
    return PartsPlan(True, min(resident, most), num_tiles, 0, 2 * min(resident, most))
