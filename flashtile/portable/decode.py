"""Attention over a key-value cache: split-KV decoding, and prefill of any length, in one Triton kernel.

The rows of a tile are the queries of all heads of a group, token after token, so that a key is read once for all of them:

    row r of a key-value head  =  token r // GROUP_SIZE, query head r % GROUP_SIZE

Work is counted in key tiles of such row tiles. BALANCED programs take equal shares of all work, one after the other through
row tiles and sequences, whatever the lengths are; each computes from the lengths in device memory where its share lies, so
nobody waits for the host. SIDE neighbours have the same share, each of another head: heads of a key lie side by side in memory
and are read at the same time. A share's row tiles are whole but for the first and the last; these leave partial results in
one of two slots of their program. With a fixed number of splits each row tile has that many programs, and its result depends on
its own sequence alone. Where a row tile has few parts, the program that is the last to store one merges them (`_arrive`), and a
call is one launch; else `merge_parts`, a kernel after it.

Where all queries of a sequence fit in a row tile, a share is one loop over key tiles (`_attend_share`), so that the loads of
the next row tile begin before the last one ends; else, or where that is faster, a loop for each row tile (`_attend_part`).

A row tile reads q once, most small ones with each key tile, and its keys and values in tiles of TILE_N slots: of a row of the
cache; of one page or of up to four whole ones, whose numbers are read a step ahead, one each; else slot by slot through the
block table.

Where tiles are small beside what a step costs all threads, a program has HEADS heads at once, which then count as one head
everywhere: tiles are (HEADS, ...), and each warp has a head of its own, whose maxima, sums and weights no other warp waits for.

Values of fp8 come as pairs of columns; what is of fp8 is multiplied in fp16, beside fp32 queries in fp32.

What it reaches is recorded (decode.json, decode-fp8.json): with 0.5 GB of keys and values in 16 bits of head dim 96 and more,
on an H200 0.93 of the rate of a copy and better. Of a small call some 10 us are fixed: in a CUDA graph an empty kernel takes
4.1 us, two 5.1. Everything that was tried, with its figures: docs/kernels/decode.md.

Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention; equal shares: Osama et al. 2023, Stream-K.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile import hardware
from flashtile.device import blocks, cache, chain, masks, scores, softmax
from flashtile.device.append import Append
from flashtile.device.launch import Launches
from flashtile.device.masks import Window
from flashtile.device.merge import ELEMENTS, LSE_COPIES, chunk_of, merge_rows, store_rows
from flashtile.device.numerics import NEG_INF
from flashtile.device.scores import ScoreParams, params_of
from flashtile.device.tensors import aligned, head_ptr, in_pairs, inner, per_head, rows_of, tile_offsets
from flashtile.kvcache_problem import FP8, CacheOperands
from flashtile.outputs import fresh, scratch
from flashtile.portable import INTERPRETED_SMS
from flashtile.tiles import ROWS_OF_WGMMA, decode_blocks_of, padded_dim

# The most heads whose keys are read side by side, and the least share of the resident programs that this leaves
MAX_SIDE, LEAST_RESIDENT = 32, 0.95
# Sequences whose work a program adds up at once
MOST_AT_ONCE = 1024
# The row tiles whose queries are loaded again with each key tile: they are small
SMALL_ROWS = tl.constexpr(16)
# What weights, at most 1, are multiplied with beside fp8 in fp16, which else has no bits for those under 2**-24 that bf16 has
FP16_WEIGHT = tl.constexpr(2.0**15)
# Rows of a program of merge_parts where few row tiles are split
MERGED_AT_ONCE = 4
# and the fewest columns, where each row tile has programs of its own
LEAST_COLUMNS = 32
# decode_attention merges where its program has all parts in so many rounds, with so many numbers a thread in each
MERGE_ROUNDS, MERGED_BY_THREAD = 2, 64
# Parts at once: where lengths differ a row tile may have more than others
LEAST_CHUNK = 8


class Partial(NamedTuple):
    """fp32 (slots, TILE_M, HEAD_DIM_V) and (slots, TILE_M, LSE_COPIES), see `merge_rows`; None where nothing is split.

    counters: int32 (row tiles,), how many parts of each are stored, 0 before and after; None where `merge_parts` merges.
    """

    out: Any
    lse: Any
    counters: Any


class Part(NamedTuple):
    """Key tiles [begin, end) of row tile `m_tile` of one key-value head; counted from the first that the sequence sees.

    Where a program has several heads, which count as one, `head` is (HEADS, 1) of them once they are told apart, see `_heads`.
    """

    batch: Any
    head: Any
    m_tile: Any
    begin: Any
    end: Any


class Shares(NamedTuple):
    """All work of one head of SIDE neighbours, and the size of a share. Of each sequence, (BATCH_BLOCK,): its work, and where
    that ends in all work; of the first ones alone, where there are more (MANY).
    """

    work: Any
    ends: Any
    total: Any
    size: Any


class Sequences(NamedTuple):
    """What tells how much work each of `count` sequences is; num_heads_kv: those that a program has at once count as one."""

    layout: Any
    window: Any
    seqlen_q: Any
    count: Any
    num_heads_kv: Any


@triton.jit
def _key_tiles(lengths, window, TILE_N: tl.constexpr):
    """(first tile, number of tiles) of the keys that some query of a sequence sees; at least one, which may be empty."""
    first = lengths.seqlen_k * 0
    if window.left is not None:
        first = tl.maximum(lengths.seqlen_k - lengths.seqlen_q - window.left, 0) // TILE_N
    return first, tl.maximum(tl.cdiv(lengths.seqlen_k, TILE_N) - first, 1)


@triton.jit
def _lengths(sequences, batch):
    """Lengths of one sequence, or of a vector of them; of none behind the last one."""
    return cache.load_cache_lengths(sequences.layout, batch, batch < sequences.count, sequences.seqlen_q)


@triton.jit
def _work(sequences, first, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, SIDE: tl.constexpr,
          BATCH_BLOCK: tl.constexpr):  # fmt: skip
    """(BATCH_BLOCK,) work of the sequences from `first` on."""
    batch = first + tl.arange(0, BATCH_BLOCK)
    lengths = _lengths(sequences, batch)
    _, tiles = _key_tiles(lengths, sequences.window, TILE_N)
    row_tiles = tl.cdiv(lengths.seqlen_q * GROUP_SIZE, TILE_M) * (sequences.num_heads_kv // SIDE)
    return tl.where(batch < sequences.count, row_tiles * tiles, 0)


@triton.jit
def _shares(sequences, num_shares, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, SIDE: tl.constexpr,
            BATCH_BLOCK: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    work = _work(sequences, 0, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK)
    total = tl.sum(work, 0)
    if MANY:
        for first in tl.range(BATCH_BLOCK, sequences.count, BATCH_BLOCK):
            total += tl.sum(_work(sequences, first, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK), 0)
    return Shares(work, tl.cumsum(work, 0), total, tl.cdiv(total, num_shares))


@triton.jit
def _locate(shares, sequences, position, side, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
            SIDE: tl.constexpr, BATCH_BLOCK: tl.constexpr, MANY: tl.constexpr, ONE_LOOP: tl.constexpr):  # fmt: skip
    """The row tile in which a position of all work lies, from there to its end; side: which of SIDE heads.

    A position behind all work is looked up too, and not used.
    """
    is_before = shares.ends <= position
    batch = tl.sum(is_before.to(tl.int32), 0)
    begin = tl.sum(tl.where(is_before, shares.work, 0), 0)
    if MANY:
        passed = tl.sum(shares.work, 0)
        for first in tl.range(BATCH_BLOCK, sequences.count, BATCH_BLOCK):
            work = _work(sequences, first, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK)
            is_before = passed + tl.cumsum(work, 0) <= position
            batch += tl.sum(is_before.to(tl.int32), 0)
            begin += tl.sum(tl.where(is_before, work, 0), 0)
            passed += tl.sum(work, 0)
    lengths = _lengths(sequences, batch)
    _, tiles = _key_tiles(lengths, sequences.window, TILE_N)
    of_head = 1 if ONE_LOOP else tl.maximum(tl.cdiv(lengths.seqlen_q * GROUP_SIZE, TILE_M), 1)
    row_tile = (position - begin) // tiles
    return Part(batch, row_tile // of_head * SIDE + side, row_tile % of_head, position - begin - row_tile * tiles, tiles)


@triton.jit
def _next(part, shares, sequences, position, side, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
          SIDE: tl.constexpr, BATCH_BLOCK: tl.constexpr, MANY: tl.constexpr, ONE_LOOP: tl.constexpr):  # fmt: skip
    """(the row tile that begins at a position, where `part` ends, lengths of its sequence)"""
    PACKED: tl.constexpr = sequences.layout.cu_seqlens_q is not None
    if ONE_LOOP:
        of_head = 1
    elif PACKED:
        of_head = tl.cdiv(_lengths(sequences, part.batch).seqlen_q * GROUP_SIZE, TILE_M)
    else:
        of_head = tl.cdiv(sequences.seqlen_q * GROUP_SIZE, TILE_M)
    m_tile = part.m_tile + 1
    head = part.head + tl.where(m_tile == of_head, SIDE, 0)
    is_new = head >= sequences.num_heads_kv
    batch = part.batch + is_new.to(tl.int32)
    lengths = _lengths(sequences, batch)
    _, tiles = _key_tiles(lengths, sequences.window, TILE_N)
    found = Part(batch, tl.where(is_new, side, head), tl.where(m_tile == of_head, 0, m_tile), position * 0, tiles)
    if PACKED:
        if (lengths.seqlen_q == 0) & (position < shares.total):
            # Sequences without queries come next; how many, all work tells
            found = _locate(shares, sequences, position, side, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY, ONE_LOOP)
            lengths = _lengths(sequences, found.batch)
    return found, lengths


@triton.jit
def _shares_of(begin, tiles, share_size):
    """(the first, how many) of the shares that have some of a row tile, whose work begins at `begin`."""
    first = begin // share_size
    return first, (begin + tiles - 1) // share_size - first + 1


@triton.jit
def _row_tile(number, window, num_tiles, num_heads_kv):
    """(sequence, key-value head, m_tile) of a row tile, where each sequence has num_tiles."""
    m_tile = number % num_tiles
    if window.right is not None:
        # the longest tiles first
        m_tile = num_tiles - 1 - m_tile
    return number // (num_tiles * num_heads_kv), number // num_tiles % num_heads_kv, m_tile


@triton.jit
def _heads(head, HEADS: tl.constexpr):
    """The HEADS numbers, (HEADS, 1), of what counts as one: heads of a program, or their slots; of one the number itself."""
    if HEADS == 1:
        return head
    else:
        return head * HEADS + tl.arange(0, HEADS)[:, None]


@triton.jit
def _load_keys(x, row, page, head, col_begin, lengths, left, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
               TILE_N: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, COL: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """(TILE_N, BLOCK_DIM) of k or v from key col_begin and column COL on, zeros past the sequence and DIM columns; of each
    head. page: `_pages_of_tile`.

    left: of the window, for v, or None. A server frees pages before it: they may hold nan, which weights of 0 do not hide.
    """
    in_tile = tl.arange(0, TILE_N)
    cols = col_begin + in_tile
    mask = (cols < lengths.seqlen_k)[:, None]
    if left is not None:
        mask = mask & (cols >= lengths.seqlen_k - lengths.seqlen_q - left)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    ptr = x.ptr + inner(head).to(tl.int64) * x.head_stride + COL
    if PAGE_SIZE == 0:
        ptr += row.to(tl.int64) * x.batch_stride + (lengths.start_k + col_begin).to(tl.int64) * x.row_stride
        ptrs = ptr + tile_offsets(in_tile, x.row_stride, DIM, BLOCK_DIM, WIDE)
    elif PAGES == 1:
        ptr += page[0].to(tl.int64) * x.batch_stride + (col_begin % PAGE_SIZE).to(tl.int64) * x.row_stride
        ptrs = ptr + tile_offsets(in_tile, x.row_stride, DIM, BLOCK_DIM, WIDE)
    elif PAGES > 1:
        pages = tl.zeros((TILE_N,), tl.int64) + page[0]
        for i in tl.static_range(1, PAGES):
            pages = tl.where(in_tile >= i * PAGE_SIZE, page[i].to(tl.int64), pages)
        # Chosen among pages, not among pages times their stride: there Triton 3.8 loses sight of 16 bytes, and of the pipeline
        ptrs = ptr + (pages * x.batch_stride)[:, None] + tile_offsets(in_tile % PAGE_SIZE, x.row_stride, DIM, BLOCK_DIM, WIDE)
    else:
        rows = page.to(tl.int64) * x.batch_stride + ((lengths.start_k + cols) % PAGE_SIZE).to(tl.int64) * x.row_stride
        ptrs = ptr + rows[:, None] + tl.arange(0, BLOCK_DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_key_blocks(x, row, page, head, col_begin, lengths, left, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
                     TILE_N: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
                     WIDE: tl.constexpr):  # fmt: skip
    """All DIM columns by `_load_keys`: a tuple of BLOCK of them and, unless it is 0, of REST behind these."""
    if REST == 0:
        return (_load_keys(x, row, page, head, col_begin, lengths, left, PAGE_SIZE, PAGES, TILE_N, DIM, BLOCK, 0, WIDE),)
    else:
        return (_load_keys(x, row, page, head, col_begin, lengths, left, PAGE_SIZE, PAGES, TILE_N, BLOCK, BLOCK, 0, WIDE),
                _load_keys(x, row, page, head, col_begin, lengths, left, PAGE_SIZE, PAGES, TILE_N, DIM - BLOCK, REST, BLOCK,
                           WIDE))  # fmt: skip


@triton.jit
def _pages_of_tile(layout, batch, n_tile, end, lengths, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
                   TILE_N: tl.constexpr):  # fmt: skip
    """The PAGES pages of a tile, numbers each, or a vector of the page of each of its keys."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGES > 0:
        pages = ()
        for i in tl.static_range(PAGES):
            col = n_tile * TILE_N + i * PAGE_SIZE
            pages = pages + (cache.load_pages(layout, batch, col // PAGE_SIZE, (col < lengths.seqlen_k) & (n_tile < end)),)
        return pages
    else:
        cols = n_tile * TILE_N + tl.arange(0, TILE_N)
        mask = (cols < lengths.seqlen_k) & (n_tile < end)
        return cache.load_pages(layout, batch, (lengths.start_k + cols) // PAGE_SIZE, mask)


@triton.jit
def _row_ptrs(x, part, lengths, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr):
    """(TILE_M,) pointers to the rows of a row tile in q, out or lse; of each head."""
    rows = part.m_tile * TILE_M + tl.arange(0, TILE_M)
    start = (lengths.start_q + rows // GROUP_SIZE).to(tl.int64)
    return head_ptr(x, part.batch, start, part.head * GROUP_SIZE + rows % GROUP_SIZE)


@triton.jit
def _load_queries(q, part, lengths, wanted, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_D: tl.constexpr, REST_D: tl.constexpr):  # fmt: skip
    """(TILE_M, BLOCK_D), and (TILE_M, REST_D) of the columns behind if there are; zeros past the sequence, and where none are
    wanted."""
    tokens = (part.m_tile * TILE_M + tl.arange(0, TILE_M)) // GROUP_SIZE
    ptrs = inner(_row_ptrs(q, part, lengths, GROUP_SIZE, TILE_M))
    dims = tl.arange(0, BLOCK_D)
    row_mask = (wanted & (tokens < lengths.seqlen_q))[:, None]
    tiles = (tl.load(ptrs + dims, mask=row_mask & (dims < HEAD_DIM)[None, :], other=0.0),)
    if REST_D > 0:
        rest = BLOCK_D + tl.arange(0, REST_D)
        tiles = tiles + (tl.load(ptrs + rest, mask=row_mask & (rest < HEAD_DIM)[None, :], other=0.0),)
    return tiles


@triton.jit
def _load_slopes(part, score_params, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr):
    """Of the rows of a row tile, (TILE_M, 1); of each head."""
    if score_params.alibi_slopes is None:
        return 0.0
    else:
        heads = part.head * GROUP_SIZE + (part.m_tile * TILE_M + tl.arange(0, TILE_M)) % GROUP_SIZE
        return inner(scores.load_slope(score_params, part.batch, heads))


@triton.jit
def _attend_tile(state, acc, q_blocks, k_blocks, v_blocks, tokens, col_begin, lengths, window, score_params, scale, slopes,
                 dtype: tl.constexpr, TILE_N: tl.constexpr, WEIGHT: tl.constexpr = 1):  # fmt: skip
    """Absorb the keys from col_begin on; acc and tiles of q, k and v are tuples of blocks of columns. They are multiplied in
    dtype, weights times WEIGHT, as acc is; v_blocks may be pairs of columns, acc as `blocks.unpaired` has them."""
    score_params = ScoreParams(scale, *score_params[1:])
    cols = col_begin + tl.arange(0, TILE_N)
    # (TILE_M, TILE_N)
    logits = blocks.dot_rows(q_blocks, k_blocks, dtype)
    diagonal = tokens[:, None] + (lengths.seqlen_k - lengths.seqlen_q - col_begin)
    rows = tl.zeros((1, 1), tl.int32)
    logits = scores.logits(logits, rows, tl.arange(0, TILE_N)[None, :], diagonal, slopes, score_params)
    logits = tl.where(masks.visible_keys(tokens[:, None], cols[None, :], lengths, window), logits, NEG_INF)
    state, p, correction = softmax.update(state, logits, scores.scale_log2(score_params), True)
    if v_blocks[0].dtype == tl.int16:
        v_blocks = blocks.unpaired(v_blocks)
    if WEIGHT != 1:
        p = p * WEIGHT
    return state, blocks.dot_add(p, v_blocks, blocks.scaled(acc, inner(correction)), dtype)


@triton.jit
def _store_part(part, slot, whole, state, acc, lengths, out, lse, partial, sinks, descales,
                GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
                HEADS: tl.constexpr):  # fmt: skip
    """acc to out and lse if the part is the whole row tile, else to a slot of the partial results."""
    rows = part.m_tile * TILE_M + tl.arange(0, TILE_M)
    row_mask = rows // GROUP_SIZE < lengths.seqlen_q
    if sinks is not None:
        # The sink is one logit more of the first part
        sink = tl.load(sinks + part.head * GROUP_SIZE + rows % GROUP_SIZE).to(tl.float32)
        state, correction = softmax.absorb_sink(state, tl.where(part.begin == 0, sink, NEG_INF))
        acc = blocks.scaled(acc, inner(correction))
    inverse, row_lse = softmax.finish(state)
    if descales.v.ptr is not None:
        inverse = inverse * per_head(descales.v, part.batch, part.head)
    acc = blocks.scaled(acc, inner(inverse))
    if whole:
        out_ptrs = inner(_row_ptrs(out, part, lengths, GROUP_SIZE, TILE_M))
        for i in tl.static_range(len(acc)):
            dims = i * BLOCK_DV + tl.arange(0, acc[i].shape[-1])
            mask = row_mask[:, None] & (dims < HEAD_DIM_V)[None, :]
            tl.store(out_ptrs + dims, acc[i].to(out.ptr.dtype.element_ty), mask=mask)
        if lse is not None:
            tl.store(_row_ptrs(lse, part, lengths, GROUP_SIZE, TILE_M), row_lse, mask=row_mask)
    else:
        places = _heads(slot.to(tl.int64), HEADS) * TILE_M + tl.arange(0, TILE_M)
        copies = inner(row_lse) + tl.zeros((1, LSE_COPIES), tl.float32)
        lse_ptrs = partial.lse + inner(places) * LSE_COPIES + tl.arange(0, LSE_COPIES)
        tl.store(lse_ptrs, copies, mask=row_mask[:, None])
        for i in tl.static_range(len(acc)):
            dims = i * BLOCK_DV + tl.arange(0, acc[i].shape[-1])
            mask = row_mask[:, None] & (dims < HEAD_DIM_V)[None, :]
            tl.store(partial.out + inner(places) * HEAD_DIM_V + dims, acc[i], mask=mask)


@triton.jit
def _merge(part, first, rest, step, num_parts, rows, exists, column, lengths, out, lse, partial, DEPENDENT: tl.constexpr,
           GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr,
           CHUNK: tl.constexpr, HEADS: tl.constexpr, LIVE: tl.constexpr):  # fmt: skip
    """COLUMNS columns from `column` on of some rows of a row tile, if it exists, from num_parts partial results.

    rows: counted through the HEADS heads, LIVE of each. first, rest, step: as for `merge_rows`. DEPENDENT: they may still be on
    their way, of the kernel before.
    """
    head = part.head
    # of a slot
    places = rows
    if HEADS > 1:
        head = part.head * HEADS + rows // LIVE
        places = rows // LIVE * TILE_M + rows % LIVE
        rows = rows % LIVE
    tokens = (part.m_tile * TILE_M + rows) // GROUP_SIZE
    row_mask = exists & (places < HEADS * TILE_M) & (tokens < lengths.seqlen_q)
    if DEPENDENT:
        chain.wait()
    if exists:
        SLOT: tl.constexpr = HEADS * TILE_M
        merged, merged_lse = merge_rows(partial.out + places * HEAD_DIM_V, partial.lse + places * LSE_COPIES, SLOT * HEAD_DIM_V,
                                        SLOT * LSE_COPIES, first, rest, step, num_parts, row_mask, column, rows.shape[0], CHUNK,
                                        HEAD_DIM_V, COLUMNS, 1)  # fmt: skip
        heads = head * GROUP_SIZE + (part.m_tile * TILE_M + rows) % GROUP_SIZE
        rows_q = (lengths.start_q + tokens).to(tl.int64)
        lse_ptrs = None
        if lse is not None:
            lse_ptrs = head_ptr(lse, part.batch, rows_q, heads)
        store_rows(merged, merged_lse, head_ptr(out, part.batch, rows_q, heads), lse_ptrs, row_mask, column, HEAD_DIM_V)


@triton.jit
def _arrive(number, part, first, rest, step, num_parts, lengths, out, lse, partial, GROUP_SIZE: tl.constexpr,
            TILE_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
            CHUNK: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """This program has stored its part of row tile `number`; whose part is the last to be there merges all, in their order."""
    # Of all threads, before one of them tells
    tl.debug_barrier()
    if tl.atomic_add(partial.counters + number, 1, sem="acq_rel") == num_parts - 1:
        tl.store(partial.counters + number, 0)
        _merge(part, first, rest, step, num_parts, tl.arange(0, HEADS * ROWS), num_parts > 0, 0, lengths, out, lse, partial,
               False, GROUP_SIZE, TILE_M, HEAD_DIM_V, COLUMNS, CHUNK, HEADS, ROWS)  # fmt: skip


@triton.jit
def _arrive_at_cut(cut, begin, shares, sequences, num_shares, side, num_tiles, out, lse, partial, GROUP_SIZE: tl.constexpr,
                   TILE_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
                   ROWS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """`_arrive` of a row tile that a border between shares cuts. begin: where its work begins; cut.end: of how many tiles."""
    first_share, num_parts = _shares_of(begin, cut.end, shares.size)
    rest = first_share * SIDE + side
    lengths = _lengths(sequences, cut.batch)
    number = (cut.batch * sequences.num_heads_kv + cut.head) * num_tiles + cut.m_tile
    _arrive(number, cut, num_shares * SIDE + rest, rest, SIDE, num_parts, lengths, out, lse, partial, GROUP_SIZE, TILE_M,
            HEAD_DIM_V, COLUMNS, ROWS, CHUNK, HEADS)  # fmt: skip


@triton.jit
def _attend_part(
    part, slot, whole, q, k, v, out, lse, partial, layout, window, score_params, sinks, descales, seqlen_q, num_sequences,
    GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_D: tl.constexpr, REST_DV: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One part of a row tile's keys."""
    part = Part(part.batch, _heads(part.head, HEADS), part.m_tile, part.begin, part.end)
    lengths = cache.load_cache_lengths(layout, part.batch, part.batch < num_sequences, seqlen_q)
    first_tile, _ = _key_tiles(lengths, window, TILE_N)
    visible = masks.key_range(part.m_tile * TILE_M // GROUP_SIZE, lengths, window, TOKENS, TILE_N)
    begin = tl.maximum(first_tile + part.begin, visible.begin)
    end = tl.minimum(first_tile + part.end, visible.end)
    tokens = (part.m_tile * TILE_M + tl.arange(0, TILE_M)) // GROUP_SIZE
    FP8: tl.constexpr = k.ptr.dtype.element_ty == tl.float8e4nv
    # e4m3 becomes fp16 by one instruction for two numbers, bf16 by six, of which two are slow
    IN_FP16: tl.constexpr = FP8 and out.ptr.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.float16 if IN_FP16 else out.ptr.dtype.element_ty
    WEIGHT: tl.constexpr = FP16_WEIGHT if IN_FP16 else 1
    PAIRS: tl.constexpr = 2 if v.ptr.dtype.element_ty == tl.int16 else 1
    RELOAD_Q: tl.constexpr = TILE_M <= SMALL_ROWS and HEADS == 1 and not IN_FP16
    scale = scores.descaled(score_params.scale, descales, part.batch, part.head)
    if not RELOAD_Q:
        q_blocks = _load_queries(q, part, lengths, True, GROUP_SIZE, TILE_M, HEAD_DIM, BLOCK_D, REST_D)
        if IN_FP16:
            q_blocks, unit = blocks.in_fp16(q_blocks)
            scale = scale * unit
    slopes = _load_slopes(part, score_params, GROUP_SIZE, TILE_M)
    if PAGE_SIZE == 0:
        cache_row = cache.cache_row(layout, part.batch)
    else:
        cache_row = part.batch
    nothing = tl.zeros((TILE_M,) if HEADS == 1 else (HEADS, TILE_M), tl.float32)
    state = softmax.OnlineSoftmax(nothing + NEG_INF, nothing)
    acc = blocks.zeros(TILE_M, BLOCK_DV // PAIRS, REST_DV // PAIRS, tl.float32, HEADS)
    if PAIRS == 2:
        acc = blocks.twice(acc)
    page = _pages_of_tile(layout, part.batch, begin, end, lengths, PAGE_SIZE, PAGES, TILE_N)
    for n_tile in tl.range(begin, end):
        # Read a step ahead: the address of the next tile is known when its load begins
        next_page = _pages_of_tile(layout, part.batch, n_tile + 1, end, lengths, PAGE_SIZE, PAGES, TILE_N)
        col_begin = n_tile * TILE_N
        if RELOAD_Q:
            # As part of the pipeline, whose first loads would wait for it
            q_blocks = _load_queries(q, part, lengths, True, GROUP_SIZE, TILE_M, HEAD_DIM, BLOCK_D, REST_D)
        k_blocks = _load_key_blocks(k, cache_row, page, part.head, col_begin, lengths, None, PAGE_SIZE, PAGES, TILE_N, HEAD_DIM,
                                    BLOCK_D, REST_D, WIDE)  # fmt: skip
        v_blocks = _load_key_blocks(v, cache_row, page, part.head, col_begin, lengths, window.left, PAGE_SIZE, PAGES, TILE_N,
                                    HEAD_DIM_V // PAIRS, BLOCK_DV // PAIRS, REST_DV // PAIRS, WIDE)  # fmt: skip
        state, acc = _attend_tile(state, acc, q_blocks, k_blocks, v_blocks, tokens, col_begin, lengths, window, score_params,
                                  scale, slopes, dtype, TILE_N, WEIGHT)  # fmt: skip
        page = next_page
    if PAIRS == 2:
        acc = blocks.paired(acc)
    if WEIGHT != 1:
        acc = blocks.scaled(acc, 1 / WEIGHT)
    _store_part(part, slot, whole, state, acc, lengths, out, lse, partial, sinks, descales, GROUP_SIZE, TILE_M,
                HEAD_DIM_V, BLOCK_DV, HEADS)  # fmt: skip


@triton.jit
def _attend_share(
    shares, share, num_shares, side, sequences, q, k, v, out, lse, partial, score_params, sinks, descales,
    GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_D: tl.constexpr,
    REST_DV: tl.constexpr, WIDE: tl.constexpr, KEEPS_Q: tl.constexpr, SIDE: tl.constexpr, BATCH_BLOCK: tl.constexpr,
    MANY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All key tiles of a share that has some, where no sequence has a second row tile."""
    layout, window = sequences.layout, sequences.window
    start = share * shares.size
    stop = tl.minimum(start + shares.size, shares.total)
    tokens = tl.arange(0, TILE_M) // GROUP_SIZE
    dtype: tl.constexpr = out.ptr.dtype.element_ty
    part = _locate(shares, sequences, start, side, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY, True)
    lengths = _lengths(sequences, part.batch)
    first_tile, _ = _key_tiles(lengths, window, TILE_N)
    cache_row = part.batch
    if PAGE_SIZE == 0:
        cache_row = cache.cache_row(layout, part.batch)
    first = part
    # of the row tile's
    tile = part.begin
    page = _pages_of_tile(layout, part.batch, first_tile + tile, first_tile + part.end, lengths, PAGE_SIZE, PAGES, TILE_N)
    state = softmax.OnlineSoftmax(tl.full((TILE_M,), NEG_INF, tl.float32), tl.zeros((TILE_M,), tl.float32))
    acc = blocks.zeros(TILE_M, BLOCK_DV, REST_DV, tl.float32)
    q_blocks = blocks.zeros(TILE_M, BLOCK_D, REST_D, q.ptr.dtype.element_ty)
    for position in tl.range(start, stop):
        col_begin = (first_tile + tile) * TILE_N
        # Asked for with each tile, as part of the pipeline
        is_first = (tile == part.begin) | (position == start)
        loaded = _load_queries(q, part, lengths, is_first | (not KEEPS_Q), GROUP_SIZE, TILE_M, HEAD_DIM, BLOCK_D, REST_D)
        q_blocks = blocks.chosen(is_first, loaded, q_blocks) if KEEPS_Q else loaded
        k_blocks = _load_key_blocks(k, cache_row, page, part.head, col_begin, lengths, None, PAGE_SIZE, PAGES, TILE_N, HEAD_DIM,
                                    BLOCK_D, REST_D, WIDE)  # fmt: skip
        v_blocks = _load_key_blocks(v, cache_row, page, part.head, col_begin, lengths, window.left, PAGE_SIZE, PAGES, TILE_N,
                                    HEAD_DIM_V, BLOCK_DV, REST_DV, WIDE)  # fmt: skip
        scale = scores.descaled(score_params.scale, descales, part.batch, part.head)
        slopes = _load_slopes(part, score_params, GROUP_SIZE, TILE_M)
        state, acc = _attend_tile(state, acc, q_blocks, k_blocks, v_blocks, tokens, col_begin, lengths, window, score_params,
                                  scale, slopes, dtype, TILE_N)  # fmt: skip
        tile += 1
        is_end = tile == part.end
        is_last = is_end | (position + 1 == stop)
        if is_last:
            slot = tl.where(part.begin > 0, share, num_shares + share) * SIDE + side
            _store_part(part, slot, is_end & (part.begin == 0), state, acc, lengths, out, lse, partial, sinks, descales,
                        GROUP_SIZE, TILE_M, HEAD_DIM_V, BLOCK_DV, 1)  # fmt: skip
        state = softmax.OnlineSoftmax(tl.where(is_last, NEG_INF, state.row_max), tl.where(is_last, 0.0, state.row_sum))
        acc = blocks.chosen(is_last, blocks.zeros(TILE_M, BLOCK_DV, REST_DV, tl.float32), acc)
        if is_end:
            part, lengths = _next(part, shares, sequences, position + 1, side, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK,
                                  MANY, True)  # fmt: skip
            first_tile, _ = _key_tiles(lengths, window, TILE_N)
            cache_row = part.batch
            if PAGE_SIZE == 0:
                # Behind the last sequence there is none
                cache_row = cache.cache_row(layout, tl.minimum(part.batch, sequences.count - 1))
            tile = part.begin
        last_tile = tl.where(position + 1 < stop, first_tile + part.end, 0)
        page = _pages_of_tile(layout, part.batch, first_tile + tile, last_tile, lengths, PAGE_SIZE, PAGES, TILE_N)
    if partial.counters is not None:
        # Not in the loop, whose loads would no longer be made ahead
        for border in range(2):
            # The row tile that the share's begin cuts, and the one that its end cuts alone
            cut = Part(tl.where(border == 0, first.batch, part.batch), tl.where(border == 0, first.head, part.head), 0, 0,
                       tl.where(border == 0, first.end, part.end))  # fmt: skip
            begin = tl.where(border == 0, start - first.begin, stop - tile)
            if tl.where(border == 0, first.begin > 0, (tile > 0) & (begin >= start)):
                _arrive_at_cut(cut, begin, shares, sequences, num_shares, side, 1, out, lse, partial, GROUP_SIZE, TILE_M,
                               HEAD_DIM_V, COLUMNS, SIDE, ROWS, CHUNK, 1)  # fmt: skip


@triton.jit(do_not_specialize=[*cache.BOUNDS, "seqlen_q", "num_sequences", "num_splits", "num_tiles"])
def decode_attention(
    q, k, v, out, lse, partial, index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q, window,
    score_params, sinks, descales, seqlen_q, num_sequences, num_heads_kv, num_tiles, num_splits, GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_D: tl.constexpr, REST_DV: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, BALANCED: tl.constexpr, ONE_LOOP: tl.constexpr, KEEPS_Q: tl.constexpr,
    HEADS: tl.constexpr, SIDE: tl.constexpr, BATCH_BLOCK: tl.constexpr, MANY: tl.constexpr, DEPENDENT: tl.constexpr,
    HAS_DEPENDENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, V_IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """q, k, v, out: Rows, those of a paged cache with a page for a batch entry. lse: pointer or None. partial: Partial.

    index_tensors to least_q: see `cache.CacheLayout`.

    num_tiles: row tiles of the longest sequence. num_splits: parts of a row tile, or without splits 1; not with BALANCED.
    ONE_LOOP: a share is one loop, and num_tiles 1. KEEPS_Q: see `tiles.DecodeConfig`. HEADS: that a program has at once; they
    count as one, in num_heads_kv too. SIDE: heads side by side, which divides num_heads_kv and the number of BALANCED programs.
    DEPENDENT: may begin before the kernel before it (`append_rows`) ends, which changes no lengths. HAS_DEPENDENT: the kernel
    after it (`merge_parts`) may begin. ROWS: of a head's row tile that there are at most, COLUMNS of them, and CHUNK: of its
    parts at once, where this kernel merges.

    BLOCK_D and BLOCK_DV: columns of a block; REST_D and REST_DV: of a second one behind it, or 0.
    """
    layout = cache.CacheLayout(*index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q)
    if lse is not None:
        lse = cache.lse_rows(lse, layout, seqlen_q, num_heads_kv * HEADS * GROUP_SIZE)
    q, k, v, out = aligned(q), aligned(k), aligned(v), aligned(out)
    if V_IN_PAIRS:
        v = in_pairs(v)
    program = tl.program_id(0)
    if HAS_DEPENDENT:
        chain.allow()
    if BALANCED:
        share = program // SIDE
        side = program % SIDE
        num_shares = tl.num_programs(0) // SIDE
        sequences = Sequences(layout, window, seqlen_q, num_sequences, num_heads_kv)
        shares = _shares(sequences, num_shares, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY)
        if DEPENDENT:
            chain.wait()
        position = share * shares.size
        stop = tl.minimum(position + shares.size, shares.total)
        if ONE_LOOP:
            if position < stop:
                _attend_share(shares, share, num_shares, side, sequences, q, k, v, out, lse, partial, score_params, sinks,
                              descales, GROUP_SIZE, PAGE_SIZE, PAGES, TILE_M, TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                              BLOCK_DV, REST_D, REST_DV, WIDE, KEEPS_Q, SIDE, BATCH_BLOCK, MANY, ROWS, COLUMNS,
                              CHUNK)  # fmt: skip
        else:
            rest = _locate(shares, sequences, position, side, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY, False)
            while position < stop:
                end = tl.minimum(rest.end, rest.begin + stop - position)
                part = Part(rest.batch, rest.head, rest.m_tile, rest.begin, end)
                slot = tl.where(rest.begin > 0, share, num_shares + share) * SIDE + side
                whole = end - rest.begin == rest.end
                _attend_part(part, slot, whole, q, k, v, out, lse, partial, layout, window, score_params, sinks, descales,
                             seqlen_q, num_sequences, GROUP_SIZE, PAGE_SIZE, PAGES, TILE_M, TILE_N, HEAD_DIM,
                             HEAD_DIM_V, BLOCK_D, BLOCK_DV, REST_D, REST_DV, TOKENS, WIDE, HEADS)  # fmt: skip
                if partial.counters is not None:
                    if not whole:
                        _arrive_at_cut(rest, position - rest.begin, shares, sequences, num_shares, side, num_tiles, out, lse,
                                       partial, GROUP_SIZE, TILE_M, HEAD_DIM_V, COLUMNS, SIDE, ROWS, CHUNK,
                                       HEADS)  # fmt: skip
                position += end - rest.begin
                rest, _ = _next(rest, shares, sequences, position, side, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY,
                                False)  # fmt: skip
    else:
        if DEPENDENT:
            chain.wait()
        batch, head, m_tile = _row_tile(program // num_splits, window, num_tiles, num_heads_kv)
        lengths = cache.load_cache_lengths(layout, batch, batch < num_sequences, seqlen_q)
        if m_tile * TILE_M < lengths.seqlen_q * GROUP_SIZE:
            _, tiles = _key_tiles(lengths, window, TILE_N)
            split = program % num_splits
            share = tl.cdiv(tiles, num_splits)
            part = Part(batch, head, m_tile, split * share, tl.minimum(tiles, (split + 1) * share))
            _attend_part(part, program, partial.out is None, q, k, v, out, lse, partial, layout, window, score_params, sinks,
                         descales, seqlen_q, num_sequences, GROUP_SIZE, PAGE_SIZE, PAGES, TILE_M, TILE_N, HEAD_DIM,
                         HEAD_DIM_V, BLOCK_D, BLOCK_DV, REST_D, REST_DV, TOKENS, WIDE, HEADS)  # fmt: skip
            if partial.counters is not None:
                number = program // num_splits
                _arrive(number, part, number * num_splits, number * num_splits, 1, num_splits, lengths, out, lse, partial,
                        GROUP_SIZE, TILE_M, HEAD_DIM_V, COLUMNS, ROWS, CHUNK, HEADS)  # fmt: skip


@triton.jit(do_not_specialize=[*cache.BOUNDS, "seqlen_q", "num_sequences", "num_splits", "num_tiles", "num_programs"])
def merge_parts(
    out, lse, partial, index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q, window, seqlen_q,
    num_sequences, num_heads_kv, num_tiles, num_splits, num_programs, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr, BALANCED: tl.constexpr, BY_TILE: tl.constexpr,
    HEADS: tl.constexpr, LIVE: tl.constexpr, SIDE: tl.constexpr, BATCH_BLOCK: tl.constexpr, MANY: tl.constexpr,
    DEPENDENT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Programs (row tile, ROWS of its rows, COLUMNS of their columns) merge its parts. Arguments of `decode_attention`.

    LIVE: of each of several heads there are at most so many.

    With BALANCED, but not BY_TILE, there are fewer programs than row tiles: a program is there for the border between two
    shares, for the row tile that the first of its borders cuts.
    """
    layout = cache.CacheLayout(*index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q)
    if lse is not None:
        lse = cache.lse_rows(lse, layout, seqlen_q, num_heads_kv * HEADS * GROUP_SIZE)
    out = aligned(out)
    program = tl.program_id(0)
    if BALANCED:
        num_shares = num_programs // SIDE
        sequences = Sequences(layout, window, seqlen_q, num_sequences, num_heads_kv)
        shares = _shares(sequences, num_shares, GROUP_SIZE, TILE_M, TILE_N, SIDE, BATCH_BLOCK, MANY)
        if BY_TILE:
            batch, head, m_tile = _row_tile(program, window, num_tiles, num_heads_kv)
            side = head % SIDE
            lengths = _lengths(sequences, batch)
            _, tiles = _key_tiles(lengths, window, TILE_N)
            of_head = tl.cdiv(lengths.seqlen_q * GROUP_SIZE, TILE_M)
            of_others = tl.sum(tl.where(tl.arange(0, BATCH_BLOCK) < batch, shares.work, 0), 0)
            share, parts = _shares_of(of_others + (head // SIDE * of_head + m_tile) * tiles, tiles, tl.maximum(shares.size, 1))
            part = Part(batch, head, m_tile, 0, tiles)
            is_mine = (m_tile < of_head) & (parts > 1)
        else:
            share = program // SIDE
            side = program % SIDE
            border = (share + 1) * shares.size
            part = _locate(shares, sequences, tl.minimum(border, shares.total), side, GROUP_SIZE, TILE_M, TILE_N, SIDE,
                           BATCH_BLOCK, MANY, False)  # fmt: skip
            _, parts = _shares_of(border - part.begin, part.end, tl.maximum(shares.size, 1))
            is_mine = (border < shares.total) & (part.begin > 0) & (part.begin <= shares.size)
        rest = share * SIDE + side
        first = num_programs + rest
    else:
        batch, head, m_tile = _row_tile(program, window, num_tiles, num_heads_kv)
        part = Part(batch, head, m_tile, 0, 0)
        first = program * num_splits
        rest = first
        parts = num_splits
        is_mine = batch < num_sequences
    lengths = cache.load_cache_lengths(layout, part.batch, is_mine, seqlen_q)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    step: tl.constexpr = SIDE if BALANCED else 1
    _merge(part, first, rest, step, parts, rows, is_mine, tl.program_id(2) * COLUMNS, lengths, out, lse, partial, DEPENDENT,
           GROUP_SIZE, TILE_M, HEAD_DIM_V, COLUMNS, CHUNK, HEADS, LIVE)  # fmt: skip


class Call:
    """Append, attend, merge: three launches at most. What stays the same from call to call is kept, compiled kernels too.

    Calls must have the shapes, strides, dtypes and alignments of operands. config: tiles.DecodeConfig. device: the
    hardware.Device that it is for, if that is not where the operands are.
    """

    def __init__(self, problem, config, operands, device=None):
        self.problem = problem
        device = device or hardware.detect(operands.q.device)
        plan = plan_parts(problem, config, device.num_sms or INTERPRETED_SMS)
        out_shape = (*operands.q.shape[:-1], problem.head_dim_v)
        # Rows of out may all be of no sequence
        self.is_empty = 0 in out_shape or plan.num_programs == 0
        self.append = Append(problem, operands, device) if problem.appends else None
        self.new_q = fresh(operands.q.shape, problem.out_dtype) if problem.rotary_dim else None
        # Rows of no sequence
        self.new_out = fresh(out_shape, problem.out_dtype, zeros=problem.varlen)
        self.new_lse = fresh(problem.lse_shape, torch.float32)
        # The lse of partial results before their out
        self.partial_rows = plan.slots * config.heads * config.tile_m
        self.launches = Launches(self.start)
        num_heads_kv = problem.num_heads_kv // config.heads
        self.shape = (problem.seqlen_q, problem.batch, num_heads_kv, plan.num_tiles, plan.num_splits)
        # See chain.py
        dependent = device.sm >= 90
        after_append = self.append is not None and self.append.grid[0] > 0
        rows = max(1, min(config.tile_m, problem.seqlen_q * problem.group_size))
        self.has_merge = plan.slots > 0 and not plan.chunk
        v_in_pairs = _in_pairs(problem, config, operands.v_cache)
        (block_d, rest_d), (block_dv, rest_dv) = (
            decode_blocks_of(dim, config.tile_m, config.heads, in_pairs)
            for dim, in_pairs in ((problem.head_dim, False), (problem.head_dim_v, v_in_pairs))
        )
        columns = padded_dim(problem.head_dim_v, 2)
        row_tiles = problem.batch * num_heads_kv * plan.num_tiles
        self.new_partial = scratch(self.partial_rows * (problem.head_dim_v + LSE_COPIES.value), row_tiles if plan.chunk else 0)
        self.merge_constexprs = {
            "GROUP_SIZE": problem.group_size, "TILE_M": config.tile_m, "TILE_N": config.tile_n,
            "HEAD_DIM_V": problem.head_dim_v, "BALANCED": plan.balanced, "HEADS": config.heads,
            "SIDE": plan.side, "BATCH_BLOCK": min(triton.next_power_of_2(problem.batch), MOST_AT_ONCE),
            "MANY": problem.batch > MOST_AT_ONCE, "DEPENDENT": dependent,
        }  # fmt: skip
        self.constexprs = self.merge_constexprs | {
            "PAGE_SIZE": problem.page_size or 0, "HEAD_DIM": problem.head_dim, "BLOCK_D": block_d, "REST_D": rest_d,
            "BLOCK_DV": block_dv, "REST_DV": rest_dv, "PAGES": problem.pages_of_tile(config.tile_n),
            "TOKENS": tokens_of_tile(config.tile_m, problem.group_size), "WIDE": problem.wide_rows,
            # In one loop queries would become fp16 with each tile
            "ONE_LOOP": (config.one_loop and config.heads == 1 and plan.num_tiles == 1
                         and config.tile_m == SMALL_ROWS.value and problem.cache_dtype != FP8),
            "KEEPS_Q": config.keeps_q,
            "DEPENDENT": dependent and after_append,
            "HAS_DEPENDENT": dependent and self.has_merge, "ROWS": triton.next_power_of_2(rows), "COLUMNS": columns,
            "CHUNK": plan.chunk, "V_IN_PAIRS": v_in_pairs,
        }  # fmt: skip
        by_tile = not plan.balanced or row_tiles <= plan.num_programs and problem.batch <= MOST_AT_ONCE
        # Small programs find room beside those that still attend; where few row tiles are split most have nothing to do
        rows_at_once = 1 if by_tile else min(triton.next_power_of_2(config.heads * rows), MERGED_AT_ONCE)
        if by_tile:
            # So few that all parts are there at once
            columns = min(columns, max(LEAST_COLUMNS, ELEMENTS // triton.next_power_of_2(plan.parts)))
        chunk = chunk_of(rows_at_once, columns, plan.parts)
        # Of one head all rows count, or the kernel would be compiled for each number of them
        live = rows if config.heads > 1 else config.tile_m
        self.merge_constexprs |= {"BY_TILE": by_tile, "LIVE": live, "ROWS": rows_at_once, "COLUMNS": columns, "CHUNK": chunk}
        self.grid = (plan.num_programs,)
        self.merge_grid = (row_tiles if by_tile else plan.num_programs, triton.cdiv(config.heads * rows, rows_at_once),
                           self.constexprs["COLUMNS"] // columns)  # fmt: skip
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages,
                        **chain.after(self.constexprs["DEPENDENT"])}  # fmt: skip
        self.merge_options = {"num_warps": 1 if by_tile and chunk <= 8 else 2, "num_stages": 1, **chain.after(dependent)}

    def __call__(self, operands):
        """out and lse (None unless asked for) as `flashtile.attention_with_kvcache` describes them; operands: in any tuple."""
        q = operands[0]
        out = self.new_out(q)
        lse = None
        if self.problem.return_lse:
            lse = self.new_lse(q)
            if self.problem.varlen:
                lse.fill_(float("-inf"))
        self.into(operands, out, lse)
        return out, lse

    def into(self, operands, out, lse):
        """The call, into memory that is there, whose other rows stay; lse may be None."""
        q = operands[0]
        q_rotated = self.new_q(q) if self.new_q is not None else None
        partial, stored = self.new_partial(q) if self.partial_rows else (None, None)
        self.launches.run(*operands, out, lse, q_rotated, partial, stored)

    def start(self, launch, *tensors):
        *operands, out, lse, q, partial, stored = tensors
        operands = CacheOperands(*operands)
        if q is None:
            q = operands.q
        if self.append is not None:
            self.append.start(launch, operands, q)
        if self.is_empty:
            return
        problem = self.problem
        # Descales, and what queries are divided by in fp16, are known on the device alone
        prescaled = problem.softmax_scale <= 0 or problem.has_descale or problem.cache_dtype == FP8
        score_params = params_of(problem, operands.alibi_slopes, prescaled)
        parts = Partial(None, None, None)
        if partial is not None:
            parts = Partial(partial[self.partial_rows * LSE_COPIES.value :], partial, stored)
        results = rows_of(out), lse, parts
        layout, window = cache.layout_arguments(problem, operands), Window(*problem.window)
        descales = scores.descales_of(operands)
        launch(
            decode_attention, self.grid,
            (rows_of(q), rows_of(operands.k_cache), rows_of(operands.v_cache), *results, *layout, window, score_params,
             operands.sinks, descales, *self.shape),
            self.constexprs, **self.options,
        )  # fmt: skip
        if self.has_merge:
            launch(merge_parts, self.merge_grid, (*results, *layout, window, *self.shape, *self.grid), self.merge_constexprs,
                   **self.merge_options)  # fmt: skip


def _in_pairs(problem, config, v_cache) -> bool:
    """Whether values are loaded two columns at a time, for products in 16 bits: see `numerics.split_pairs`.

    Their tiles have half of the columns, and wgmma is not to have tiles of fewer than 64: see `tiles.padded_dim`.
    """
    if problem.cache_dtype != FP8 or problem.out_dtype.itemsize != 2:
        return False
    even = all(stride % 2 == 0 for stride in v_cache.stride()[:3]) and v_cache.data_ptr() % 2 == 0
    columns = decode_blocks_of(problem.head_dim_v, config.tile_m, config.heads, in_pairs=True)
    return even and (config.tile_m < ROWS_OF_WGMMA or min(filter(None, columns)) >= 2 * 64)


def tokens_of_tile(tile_m, group_size) -> int:
    """The most tokens whose rows stand in one tile."""
    if tile_m % group_size == 0:
        return tile_m // group_size
    return 1 if group_size % tile_m == 0 else (tile_m + group_size - 2) // group_size + 1


class PartsPlan(NamedTuple):
    """How row tiles are divided among programs. side: heads side by side. slots: of partial results, 0 where none is split.

    parts: of a row tile, about, where all sequences are as long. chunk: of these at once, where the kernel itself merges; 0
    where another does, or nothing is split.
    """

    balanced: bool
    side: int
    num_programs: int
    num_tiles: int
    num_splits: int
    slots: int
    parts: int = 1
    chunk: int = 0


def plan_parts(problem, config, num_sms) -> PartsPlan:
    """From shapes alone: lengths are on the device."""
    num_tiles = -(-problem.longest_q * problem.group_size // config.tile_m)
    num_heads_kv = problem.num_heads_kv // config.heads
    row_tiles = problem.batch * num_heads_kv * num_tiles
    busy = problem.busy * num_heads_kv * num_tiles
    splits = problem.num_splits
    if splits:
        slots = row_tiles * splits if splits > 1 else 0
        plan = PartsPlan(False, 1, row_tiles * splits, num_tiles, splits, slots, splits)
    else:
        resident = num_sms * config.programs_per_sm
        side = next(n for n in range(min(MAX_SIDE, resident), 0, -1)
                    if num_heads_kv % n == 0 and resident // n * n >= LEAST_RESIDENT * resident)  # fmt: skip
        most = row_tiles // side * max(1, -(-problem.capacity // config.tile_n))
        if config.whole or num_tiles > 1 and busy >= 2 * resident or most >= 2**31:
            return PartsPlan(False, 1, row_tiles, num_tiles, 1, 0)
        num_programs = min(resident // side, most) * side
        plan = PartsPlan(True, side, num_programs, num_tiles, 0, 2 * num_programs, num_programs // max(row_tiles, 1) + 2)
    # With fp32 tiles the loop leaves no registers free
    if plan.slots == 0 or config.tile_m > SMALL_ROWS.value or problem.out_dtype.itemsize > 2:
        return plan
    rows = config.heads * triton.next_power_of_2(max(1, min(config.tile_m, problem.seqlen_q * problem.group_size)))
    at_once = MERGED_BY_THREAD * 32 * config.num_warps // (rows * padded_dim(problem.head_dim_v, 2))
    few = at_once > 1 and plan.parts <= MERGE_ROUNDS * at_once
    return plan._replace(chunk=min(max(LEAST_CHUNK, triton.next_power_of_2(plan.parts)), at_once) if few else 0)
