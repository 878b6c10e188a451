"""The Hopper kernel of latent attention decode, dense and sparse: warp-specialised, TMA and asynchronous wgmma, in Gluon.

    partition     warps   does
    _compute x 2  4 each  scores and softmax of every second key tile; of all tiles, one half of the 512 output columns
    _produce      1       queries of a sequence and key tiles of the program's part, to shared memory; 4 where it gathers tokens

64 rows by 512 columns of output are 128 KiB: two partitions hold half each, and both need the probabilities of all keys. So
tile i is scored by partition i % 2, which hands its probabilities to the other through shared memory, in the place of the
tile's rotary part, of no use by then. With them travels row_max, so that both halves keep one reference:

    scorer(i):  q kᵀ(i) but for a chunk;  acc += p(i-1) c(i-1);  that chunk of q kᵀ(i);  p(i), row_max;  acc += p(i) c(i)

While one computes its probabilities, products of the other run. Each sums its own tiles' probabilities until the sequence ends
(`_join`), and row_max changes only where it must (`softmax.lazy_max`), so that acc is hardly ever rescaled.

Queries and two key tiles fill the shared memory. Tile i + 2 takes the slot of tile i half by half, as soon as its partition has
multiplied with that half: half h of a slot belongs to partition h, and a scorer begins with its own half, which comes first.
TMA fills a half in chunks, each with a barrier, so that scores begin when 128 columns are there, and p(i-1) is wanted late. The
last tile's halves stay with their partitions, and take the result of a whole sequence, which TMA stores.

Where pages are whole tiles, TMA loads them (`_load`); a tile that a sequence ends in is filled up with zeros
(`cache_descriptor`), so that NaN in unused slots is never read. Tokens of indices and of other pages are copied one by one
(`_gather`), packed ones loaded and unpacked (`_gather_packed`); tokens of no index get -inf as a bias.

Packed numbers become fp16, 4 instructions for 4 numbers where bf16 takes 12, and keep all bits of e4m3 times a power of two of
some 22 binades; bf16 stays the rotary part. So that fp16 holds them, a tile's numbers are divided by 2**e, mostly 1, and so are
its rotary part (by the producer) and what its weights are to the sum (`softmax.update_lazily_scaled`); the queries of a row are
divided by a power of two as well (`_convert_queries`). Many indices into a large cache are put in order first, see order.py.

What limits it, and everything that was tried with its figures: docs/kernels/mla.md.

Source: the form of the schedule is FlashMLA's ("seesaw"), by its description.
"""

from typing import Any, NamedTuple

import torch

from flashtile.device import chain, columns, softmax
from flashtile.device.barriers import allocate_barriers
from flashtile.device.compat import (
    TensorDescriptor,
    async_copy,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.merge import LSE_COPIES
from flashtile.device.numerics import LOG2_E, NEG_INF
from flashtile.device.partitions import specialize
from flashtile.mla import cache, order, portable, schedule

ROWS = gl.constexpr(64)
TILE = schedule.TILE
HALF = gl.constexpr(256)
LATENT = gl.constexpr(512)
# Columns that TMA fills, and tells of, at once
CHUNK = gl.constexpr(128)
# From how many bytes of a packed cache, and looked up tokens, indices are put in order first
ORDERED_BYTES, ORDERED_TOKENS = 1 << 30, 1 << 18
# What a cache descriptor takes for the number of rows; see `cache_descriptor`
MANY_ROWS = gl.constexpr(2**30)
SCALES_BYTE = gl.constexpr(cache.SCALES_BYTE)
PACKED_BYTES = gl.constexpr(cache.TOKEN_BYTES)
ROPE_BYTE = gl.constexpr(cache.ROPE_BYTE)
# Packed tokens are numbers times 2**(VALUE_SHIFT - e) in fp16, e mostly 0: then up to 448, with scales of 22 binades
VALUE_SHIFT = gl.constexpr(7)
VALUE_UNIT = gl.constexpr(2.0**-VALUE_SHIFT.value)
# Below this exponent of a tile's largest scale e is less than 0, but not below the lowest
SMALL, LOWEST = gl.constexpr(-14), gl.constexpr(-40)
# Rows of a cache begin at multiples of so many bytes, which 32-bit offsets count: tokens are looked up below the limit
UNIT = gl.constexpr(16)
MAX_GATHERED_BYTES = 2**31 * UNIT.value
# A tile's shared memory as int32
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# A number that all threads have
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Of a consumer's thread; gathering takes registers of its own, and one warp that loads few
REGISTERS = 240
REGISTERS_GATHERING = 192
LOAD_REGISTERS = gl.constexpr(24)


class Ring(NamedTuple):
    """Shared memory and its barriers: x_ready when x is filled, x_free when it may be filled again."""

    # two halves, as TMA leaves them, and as products take them: the same memory
    q_smem: Any
    q_operand_smem: Any
    q_rope_smem: Any
    # slot * 2 + half
    latent_smem: Any
    # rotary part of a slot, then its probabilities: the same memory
    rope_smem: Any
    p_smem: Any
    # softmax's reference of the tile of a slot
    max_smem: Any
    # sums of a partition's own tiles, (index of the sequence & 1) * 2 + partition
    sum_smem: Any
    # 0 or -inf for each token of a slot; None where only the end of a sequence hides
    bias_smem: Any
    # e of a slot of packed tokens (see `_exponent`); None where none are
    exponent_smem: Any
    # Largest magnitude of each row of queries, by halves; None unless tokens are packed
    q_max_smem: Any
    # Pairs of scales of packed tokens; None where none are
    scale_smem: Any
    # What leads to the packed tokens of the tile after the next; None where none are
    entry_smem: Any
    q_ready: Any
    q_free: Any
    # Both partitions have stored what they do to queries for packed tokens
    q_max_ready: Any
    q_converted: Any
    # (slot * 2 + half) * chunks + chunk; see `_chunks`
    latent_ready: Any
    latent_free: Any
    p_ready: Any
    sum_ready: Any
    # The same memory as latent_smem, in the order of latent_ready; None where threads write the tiles, halves at once
    chunk_smem: Any


class Segment(NamedTuple):
    """Tiles [first, end) of one sequence."""

    sequence: Any
    length: Any
    first: Any
    end: Any
    # Whether these are all its tiles
    whole: Any


@gluon.jit
def _segment(cache_seqlens, part, index, max_length, SEQUENCES_PER_LENGTH: gl.constexpr):
    """The index-th sequence of a part.

    Made anew in each round: what is carried from round to round and only used in bounds of an inner loop, Gluon 3.6 forgets to
    carry, and the partitions disagree about the number of tiles.
    """
    begin, begin_tile, last, end_tile = part
    sequence = begin + index
    length = schedule.key_length(cache_seqlens, sequence, max_length, SEQUENCES_PER_LENGTH)
    num_tiles = schedule.num_tiles_of(length)
    first, end = schedule.part_tiles(sequence, num_tiles, begin, begin_tile, last, end_tile)
    whole = schedule.is_whole(sequence, begin, begin_tile, last, end_tile)
    return Segment(sequence, length, first, gl.maximum(end, first), whole)


@gluon.constexpr_function
def _chunks(latent_ready):
    """How many pieces of a half of a slot come one by one."""
    return latent_ready.shape[0] // 4


@gluon.jit
def _load_keys(desc, smem, page, row, valid, column, ready):
    """Half of a tile, or its rotary part: 64 tokens from `row` of a page on, zeros behind the first `valid`."""
    tma_load(desc, [MANY_ROWS, row + valid, page, MANY_ROWS - valid, column], ready, smem)


@gluon.jit
def _slot(step):
    """(slot, phase of its ready barriers) of a tile. The slot is also the number of the partition that scores it.

    The compiler must not know that: it would keep the address of every product in a register, and spill them.
    """
    step = gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)
    return step & 1, (step >> 1) & 1


@gluon.jit
def _page(pages, tile, length, num_pages, TILES_PER_PAGE: gl.constexpr):
    """The page of a tile, limited to those that exist."""
    page = gl.load(pages + tile // TILES_PER_PAGE, mask=tile * TILE < length, other=0)
    return gl.minimum(gl.maximum(page, 0), num_pages - 1)


@gluon.jit
def _prefetch_tile(keys, page, row, valid, ROPE: gl.constexpr):
    """Bring a tile to L2 if its tokens lie side by side: one thread asks for all of it."""
    ptr = keys.latent.ptr + page.to(gl.int64) * keys.latent.batch_stride + row.to(gl.int64) * keys.latent.row_stride
    side_by_side = keys.latent.row_stride == 2 * (LATENT + ROPE)
    num_bytes = gl.where(side_by_side, gl.minimum(valid, TILE) * (2 * (LATENT + ROPE)), 0)
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        .reg .b32 thread;
        mov.u32 thread, %laneid;
        setp.eq.u32 wanted, thread, 0;
        setp.gt.and.s32 wanted, $2, 0, wanted;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [ptr.to(gl.int64), num_bytes], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _load_queries(q_desc, q_rope_desc, ring, sequence, index, ROPE: gl.constexpr):
    """The queries of the index-th sequence of a part."""
    m_row = gl.program_id(0) * ROWS
    mbarrier.wait(ring.q_free, (index & 1) ^ 1)
    if ROPE:
        mbarrier.expect(ring.q_ready, 2 * q_desc.block_type.nbytes + q_rope_desc.block_type.nbytes)
        tma_load(q_rope_desc, [sequence, m_row, LATENT], ring.q_ready, ring.q_rope_smem)
    else:
        mbarrier.expect(ring.q_ready, 2 * q_desc.block_type.nbytes)
    tma_load(q_desc, [sequence, m_row, 0], ring.q_ready, ring.q_smem.index(0))
    tma_load(q_desc, [sequence, m_row, HALF], ring.q_ready, ring.q_smem.index(1))


@gluon.jit
def _load(q_desc, q_rope_desc, latent_desc, rope_desc, ring, keys, lengths, max_length, part, TILES_PER_PAGE: gl.constexpr,
          ROPE: gl.constexpr, PREFETCH: gl.constexpr):  # fmt: skip
    """The producer where pages are tiles."""
    CHUNKS: gl.constexpr = _chunks(ring.latent_ready)
    num_pages = keys.num_slots // (TILES_PER_PAGE * TILE)
    begin, begin_tile, last, end_tile = part
    step = 0
    for index in range(last - begin + 1):
        segment = _segment(lengths, part, index, max_length, 1)
        pages = keys.block_table + segment.sequence.to(gl.int64) * keys.entry_stride
        page = _page(pages, segment.first, segment.length, num_pages, TILES_PER_PAGE)
        following_page = _page(pages, segment.first + 1, segment.length, num_pages, TILES_PER_PAGE)
        _load_queries(q_desc, q_rope_desc, ring, segment.sequence, index, ROPE)
        for tile in range(segment.first, segment.end):
            slot = step & 1
            free_phase = ((step >> 1) & 1) ^ 1
            valid = gl.minimum(segment.length - tile * TILE, TILE)
            row = (tile % TILES_PER_PAGE) * TILE
            this_page = page
            page = following_page
            following_page = _page(pages, tile + 2, segment.length, num_pages, TILES_PER_PAGE)
            if PREFETCH:
                row_ahead = (tile + 1) % TILES_PER_PAGE * TILE
                # One of the row blocks, which all read it at about the same time
                is_mine = (tile + 1) % gl.num_programs(0) == gl.program_id(0)
                valid_ahead = gl.where(is_mine, segment.length - (tile + 1) * TILE, 0)
                _prefetch_tile(keys, page, row_ahead, valid_ahead, ROPE)
            # The scorer's half first
            for i in gl.static_range(2):
                half = slot if i == 0 else 1 - slot
                place = slot * 2 + half
                mbarrier.wait(ring.latent_free.index(place), free_phase)
                for chunk in gl.static_range(CHUNKS):
                    ready = ring.latent_ready.index(place * CHUNKS + chunk)
                    if ROPE and i == 1 and chunk == 0:
                        mbarrier.expect(ready, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes)
                        _load_keys(rope_desc, ring.rope_smem.index(slot), this_page, row, valid, LATENT, ready)
                    else:
                        mbarrier.expect(ready, latent_desc.block_type.nbytes)
                    _load_keys(latent_desc, ring.chunk_smem.index(place * CHUNKS + chunk), this_page, row, valid,
                               half * HALF + chunk * CHUNK, ready)  # fmt: skip
            step += 1


@gluon.jit
def _offsets(keys, entries, cols, length):
    """From the first token of the cache to the tokens `cols`, in UNIT bytes; negative where hidden."""
    page, offset, visible = portable.place(keys, entries, cols, length)
    offsets = page * (keys.latent.batch_stride // UNIT).to(gl.int32) + offset * (keys.latent.row_stride // UNIT).to(gl.int32)
    return gl.where(visible & (cols < length), offsets, -1)


@gluon.jit
def _bytes_at(keys, offsets, byte):
    return keys.latent.ptr + (offsets.to(gl.int64) * UNIT + byte)


@gluon.jit
def _prefetch_packed(keys, offsets, pairs: gl.constexpr):
    """Bring packed tokens to L2, two threads each.

    Loads from shared memory wait behind it: 800 clocks where there were six prefetches a thread (ncu, one run).
    """
    for first in gl.static_range(0, PACKED_BYTES, 256):
        byte = first + 128 * gl.arange(0, 2, gl.SliceLayout(1, pairs))
        wanted = (offsets >= 0)[None, :] & (byte < PACKED_BYTES)[:, None]
        gl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [_bytes_at(keys, offsets[None, :], byte[:, None]).to(gl.int64), wanted.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _word_ptrs(keys, rows, byte, NUMBER: gl.constexpr, layout: gl.constexpr):
    """NUMBER words of each token from a byte on, as int32. rows: offsets of the tokens."""
    begins = _bytes_at(keys, rows, byte).to(gl.pointer_type(gl.int32), bitcast=True)
    return begins[:, None] + gl.arange(0, NUMBER, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _words_of_half(ring, slot, half):
    """A half of a slot as int32."""
    return reinterpret(ring.latent_smem.index(slot * 2 + half).reshape([TILE, HALF]), gl.int32, [TILE, HALF // 2], WORDS)


@gluon.jit
def _copy_half(ring, keys, rows, slot, half, layout: gl.constexpr):
    """A half of each token that is not packed goes straight to its place; zeros where hidden."""
    ptrs = _word_ptrs(keys, rows, half * (2 * HALF), HALF // 2, layout)
    copy_async(_words_of_half(ring, slot, half), ptrs, mask=(rows >= 0)[:, None])


@gluon.jit
def _copy_rope(ring, keys, rows, byte, slot, layout: gl.constexpr):
    """The rotary part of each token, which is never packed."""
    smem = reinterpret(ring.rope_smem.index(slot).reshape([TILE, 64]), gl.int32, [TILE, 32], WORDS)
    copy_async(smem, _word_ptrs(keys, rows, byte, 32, layout), mask=(rows >= 0)[:, None])


@gluon.jit
def _load_group(keys, rows, number: gl.constexpr, own, layout: gl.constexpr):
    """The numbers of each packed token that have one scale, of four such groups, in two pieces; half `own` first."""
    half = own if number < 2 else 1 - own
    byte = half * HALF + number % 2 * 128
    return (gl.load(_word_ptrs(keys, rows, byte, 16, layout), mask=(rows >= 0)[:, None], other=0),
            gl.load(_word_ptrs(keys, rows, byte + 64, 16, layout), mask=(rows >= 0)[:, None], other=0))  # fmt: skip


@gluon.jit
def _copy_scales(ring, keys, offsets, slot, pairs: gl.constexpr):
    """The two scales of the half that comes first in a slot, then those of the other."""
    half = gl.arange(0, 2, gl.SliceLayout(1, pairs)) ^ slot
    ptrs = _bytes_at(keys, offsets[None, :], (SCALES_BYTE + 8 * half)[:, None])
    copy_async(ring.scale_smem.index(slot).reshape([2, TILE]), ptrs.to(gl.pointer_type(gl.int64), bitcast=True),
               mask=(offsets >= 0)[None, :] & (half >= 0)[:, None])  # fmt: skip


@gluon.jit
def _copy_entries(ring, keys, sequence, cols, length):
    """`portable.look_up` by copies; zeros where hidden."""
    ptrs = portable.entry_ptrs(keys, sequence, cols)
    copy_async(ring.entry_smem, ptrs, mask=cols < length)


@gluon.jit
def _power(exponents):
    """2**exponents of integers from -126 to 127."""
    return ((exponents + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _exponent(largest):
    """e of a tile by the bits of its largest scale: its numbers lie as number * 2**(VALUE_SHIFT - e) in shared memory.

    It is 0 unless numbers are so large or so small that fp16 would not hold them.
    """
    exponent = (largest >> 23) - 127
    small = (exponent < SMALL) & (largest > 0)
    return gl.where(small, gl.maximum(exponent + VALUE_SHIFT, LOWEST), gl.maximum(exponent + 1, 0))


@gluon.jit
def _scale_bits(ring, slot, layout: gl.constexpr):
    """The four scales of the tokens of a slot, those of the half first that comes first."""
    bits = ()
    for half in gl.static_range(2):
        both = ring.scale_smem.index(slot).slice(half * TILE, TILE).load(layout)
        bits = bits + (both.to(gl.int32), (both >> 32).to(gl.int32))
    return bits


@gluon.jit
def _largest_scale(bits):
    larger = gl.maximum(bits[0] & 0x7FFFFFFF, bits[1] & 0x7FFFFFFF)
    return gl.max(gl.maximum(larger, gl.maximum(bits[2] & 0x7FFFFFFF, bits[3] & 0x7FFFFFFF)), 0)


@gluon.jit
def _load_scales(ring, slot, row_layout: gl.constexpr):
    """(e of a slot, four scales of each of its tokens by which its numbers become fp16, twice in an int32)."""
    bits = _scale_bits(ring, slot, row_layout)
    if ring.bias_smem is not None:
        e = _exponent(_largest_scale(bits))
    else:
        # Each warp looks at all tokens, and waits for no other. With indices that is slower
        every: gl.constexpr = gl.DistributedLinearLayout([[32]], [[1], [2], [4], [8], [16]], [[0], [0]], [], [TILE])
        e = _exponent(_largest_scale(_scale_bits(ring, slot, every)))
    scales = ()
    for i in gl.static_range(4):
        scale = bits[i].to(gl.float32, bitcast=True) * _power(VALUE_SHIFT - e)
        scales = scales + (gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=gl.int32,
                                                     is_pure=True, pack=1),)  # fmt: skip
    return e, scales


@gluon.jit
def _unpack(words, scale):
    """The numbers of a piece in fp16, two in an int32: (TILE, 32). scale: of each token, as `_load_scales` gives it."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b16 a<2>;
        .reg .b32 h<2>;
        mov.b32 {a0, a1}, $2;
        cvt.rn.f16x2.e4m3x2 h0, a0;
        cvt.rn.f16x2.e4m3x2 h1, a1;
        mul.f16x2 $0, h0, $3;
        mul.f16x2 $1, h1, $3;
        }""",
        "=r,=r,r,r", [words, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    return gl.join(low, high).reshape([TILE, 32])


@gluon.jit
def _larger(left, right):
    """Of pairs of bf16 that are not negative."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest(pairs):
    """Largest magnitude of each row, fp32, of pairs of bf16 that lie in fours of a thread and 8 of those in a row."""
    pairs = pairs & 0x7FFF7FFF
    for _ in gl.static_range(2 if pairs.shape[1] == 128 else 0):
        left, right = columns.halves(pairs)
        pairs = _larger(left, right)
    for _ in gl.static_range(2):
        left, right = pairs.reshape([ROWS, pairs.shape[1] // 2, 2]).split()
        pairs = _larger(left, right)
    return gl.max(gl.maximum(pairs << 16, pairs & 0x7FFF0000), 1).to(gl.float32, bitcast=True)


@gluon.jit
def _scaled_pairs(pairs, factor, to_fp16: gl.constexpr):
    """Pairs of bf16 times a number a row, as pairs of fp16 or of bf16."""
    INSTRUCTION: gl.constexpr = "cvt.rn.f16x2.f32 $0, y, x;" if to_fp16 else "cvt.rn.bf16x2.f32 $0, y, x;"
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x, y; shl.b32 x, $1, 16; and.b32 y, $1, 0xffff0000; mul.f32 x, x, $2; mul.f32 y, y, $2; "
        + INSTRUCTION + " }", "=r,r,f", [pairs, factor[:, None]], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _scale_rope(ring, slot, e, layout: gl.constexpr):
    """Divide the rotary part of packed tokens by 2**e, as it stands beside the others; layout: of `_copy_rope`."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    partition_barrier()
    smem = reinterpret(ring.rope_smem.index(slot).reshape([TILE, 64]), gl.int32, [TILE, 32], WORDS)
    factor = gl.full([TILE], 1.0, gl.float32, gl.SliceLayout(1, layout)) * _power(-e)
    smem.store(_scaled_pairs(smem.load(layout), factor, False))


@gluon.jit
def _first_tokens(keys, segment, tokens: gl.constexpr):
    """Offsets of a segment's first two tiles of tokens, and the entries of the third."""
    cols = segment.first * TILE + gl.arange(0, TILE, tokens)
    entries = portable.look_up(keys, segment.sequence, cols, segment.length)
    following = portable.look_up(keys, segment.sequence, cols + TILE, segment.length)
    coming = portable.look_up(keys, segment.sequence, cols + 2 * TILE, segment.length)
    now = _offsets(keys, entries, cols, segment.length)
    return now, _offsets(keys, following, cols + TILE, segment.length), coming


@gluon.jit
def _gather(q_desc, q_rope_desc, ring, keys, lengths, max_length, part, SEQUENCES_PER_LENGTH: gl.constexpr,
            ROPE: gl.constexpr):  # fmt: skip
    """The producer where tokens lie anywhere, unpacked. It waits for none: each thread's copies tell the barrier themselves.

    Of tile i + 3, what leads to its tokens is on its way to registers while tile i is copied.
    """
    # 16 bytes a thread; 8 threads that store together cover a row of 128 bytes and meet all banks once
    lanes: gl.constexpr = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    half_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [0, 64], [16, 0], [32, 0]], lanes, [[4, 0], [8, 0]], [], [TILE, HALF // 2])
    rope_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]], lanes, [[4, 0], [8, 0]], [], [TILE, 32])
    # Two threads a token. A warp has the tokens that it copies, so that conversions stay inside
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        [], [[1, 0], [0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8]], [], [2, TILE])
    tokens: gl.constexpr = gl.SliceLayout(0, pairs)
    begin, begin_tile, last, end_tile = part
    step = 0
    for index in range(last - begin + 1):
        segment = _segment(lengths, part, index, max_length, SEQUENCES_PER_LENGTH)
        sequence = segment.sequence
        length = segment.length
        now, following, coming = _first_tokens(keys, segment, tokens)
        if index > 0:
            _load_queries(q_desc, q_rope_desc, ring, sequence, index, ROPE)
        for tile in range(segment.first, segment.end):
            slot = step & 1
            free_phase = ((step >> 1) & 1) ^ 1
            cols = tile * TILE + gl.arange(0, TILE, tokens)
            ahead = _offsets(keys, coming, cols + 2 * TILE, length)
            coming = portable.look_up(keys, sequence, cols + 3 * TILE, length)
            rows = gl.convert_layout(now, gl.SliceLayout(1, half_layout))
            # The scorer's half first
            own = slot * 3
            mbarrier.wait(ring.latent_free.index(own), free_phase)
            if ring.bias_smem is not None:
                ring.bias_smem.index(slot).store(gl.where(now >= 0, 0.0, NEG_INF))
            _copy_half(ring, keys, rows, slot, slot, half_layout)
            async_copy.mbarrier_arrive(ring.latent_ready.index(own), increment_count=False)
            mbarrier.arrive(ring.latent_ready.index(own), count=1)
            other = slot * 2 + 1 - slot
            mbarrier.wait(ring.latent_free.index(other), free_phase)
            _copy_half(ring, keys, rows, slot, 1 - slot, half_layout)
            if ROPE:
                _copy_rope(ring, keys, gl.convert_layout(now, gl.SliceLayout(1, rope_layout)), 2 * LATENT, slot, rope_layout)
            async_copy.mbarrier_arrive(ring.latent_ready.index(other), increment_count=False)
            mbarrier.arrive(ring.latent_ready.index(other), count=1)
            now = following
            following = ahead
            step += 1


@gluon.jit
def _gather_packed(q_desc, q_rope_desc, ring, keys, lengths, max_length, part, SEQUENCES_PER_LENGTH: gl.constexpr,
                   ROPE: gl.constexpr):  # fmt: skip
    """The producer of packed tokens, which it unpacks to fp16. Copies of the rotary part tell the barrier themselves.

    All pieces of tile i + 1 are on their way to registers while tile i is stored, then tile i + 2 is asked for at L2; what
    leads to tile i + 3 is on its way. ptxas counts most loads of a loop by one scoreboard: who waits for one waits for all,
    hence one wait a tile, and copies for the scales and for what leads to tokens. Loads of spilled registers wait for all, too.
    """
    # Pieces of 64 bytes, 16 a thread, so that a thread has two tokens; stored, they grow to half a row each
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [TILE, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rope_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0], [32, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [TILE, 32])
    # Two threads a token. A warp has the tokens that it has in `layout`, so that conversions stay inside
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        [], [[1, 0], [0, 1], [0, 2], [0, 4], [0, 32]], [[0, 8], [0, 16]], [], [2, TILE])
    tokens: gl.constexpr = gl.SliceLayout(0, pairs)
    begin, begin_tile, last, end_tile = part
    step = 0
    for index in range(last - begin + 1):
        segment = _segment(lengths, part, index, max_length, SEQUENCES_PER_LENGTH)
        sequence = segment.sequence
        length = segment.length
        now, following, coming = _first_tokens(keys, segment, tokens)
        async_copy.wait_group(0)
        partition_barrier()
        ring.entry_smem.store(coming)
        _copy_scales(ring, keys, now, step & 1, pairs)
        async_copy.commit_group()
        rows = gl.convert_layout(now, row_layout)
        held = ()
        for number in gl.static_range(4):
            held = held + _load_group(keys, rows, number, step & 1, layout)
        _prefetch_packed(keys, following, pairs)
        if index > 0:
            _load_queries(q_desc, q_rope_desc, ring, sequence, index, ROPE)
        for tile in range(segment.first, segment.end):
            slot = step & 1
            free_phase = ((step >> 1) & 1) ^ 1
            cols = tile * TILE + gl.arange(0, TILE, tokens)
            # Scales, and what leads to the tile after the next
            async_copy.wait_group(0)
            partition_barrier()
            ahead = _offsets(keys, ring.entry_smem.load(tokens), cols + 2 * TILE, length)
            e, scales = _load_scales(ring, slot, row_layout)
            # The scorer's half first
            own = slot * 3
            other = slot * 2 + 1 - slot
            mbarrier.wait(ring.latent_free.index(own), free_phase)
            if ring.bias_smem is not None:
                ring.bias_smem.index(slot).store(gl.where(now >= 0, 0.0, NEG_INF))
            ring.exponent_smem.index(slot).store(gl.full([1], 0.0, gl.float32, ONE) + e.to(gl.float32))
            following_rows = gl.convert_layout(following, row_layout)
            for number in gl.static_range(4):
                if number == 2:
                    mbarrier.arrive(ring.latent_ready.index(own), count=1)
                    mbarrier.wait(ring.latent_free.index(other), free_phase)
                    rope_rows = gl.convert_layout(now, gl.SliceLayout(1, rope_layout))
                    _copy_rope(ring, keys, rope_rows, ROPE_BYTE, slot, rope_layout)
                    if e != 0:
                        _scale_rope(ring, slot, e, rope_layout)
                    async_copy.mbarrier_arrive(ring.latent_ready.index(other), increment_count=False)
                    _copy_scales(ring, keys, following, 1 - slot, pairs)
                    _copy_entries(ring, keys, sequence, cols + 3 * TILE, length)
                    async_copy.commit_group()
                half = _words_of_half(ring, slot, slot if number < 2 else 1 - slot)
                words = columns.beside(_unpack(held[0], scales[number]), _unpack(held[1], scales[number]))
                half.slice(number % 2 * 64, 64, dim=1).store(words)
                held = held[2:] + _load_group(keys, following_rows, number, 1 - slot, layout)
            mbarrier.arrive(ring.latent_ready.index(other), count=1)
            _prefetch_packed(keys, ahead, pairs)
            now = following
            following = ahead
            step += 1


@gluon.jit
def _wait_latent(ring, half, phase, CHUNK_NUMBER: gl.constexpr = 0, pred=True):
    """Until a chunk of a half of a slot may be multiplied. What threads wrote, products see behind a fence.

    Not the producer: it is a MEMBAR, which waits for all that the warp has asked for, later loads and prefetches too.
    """
    CHUNKS: gl.constexpr = _chunks(ring.latent_ready)
    mbarrier.wait(ring.latent_ready.index(half * CHUNKS + CHUNK_NUMBER), phase, pred=pred)
    if ring.chunk_smem is None:
        fence_async_shared()


@gluon.jit
def _convert_queries(ring, index, row_layout: gl.constexpr, W: gl.constexpr):
    """Queries for packed tokens, where TMA left them: half W of the latent part in fp16; partition 0 the rotary part as well.

    A row is divided by a power of two, so that fp16 holds it. Returns the unit of its scores.
    """
    # A warp has the rows that it has in scores
    lanes: gl.constexpr = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    half_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [0, 64], [4, 0], [8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, HALF // 2])
    rope_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0], [8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 32])
    half_smem = reinterpret(ring.q_smem.index(W).reshape([ROWS, HALF]), gl.int32, [ROWS, HALF // 2], WORDS)
    rope_smem = reinterpret(ring.q_rope_smem.reshape([ROWS, 64]), gl.int32, [ROWS, 32], WORDS)
    half = half_smem.load(half_layout)
    largest = gl.convert_layout(_largest(half), row_layout)
    if W == 0:
        largest = gl.maximum(largest, gl.convert_layout(_largest(rope_smem.load(rope_layout)), row_layout))
    ring.q_max_smem.index(W).store(largest)
    mbarrier.arrive(ring.q_max_ready, count=1)
    mbarrier.wait(ring.q_max_ready, index & 1)
    largest = gl.maximum(largest, ring.q_max_smem.index(1 - W).load(row_layout))
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    exponent = gl.minimum(gl.maximum(exponent, -100), 100)
    factor = gl.convert_layout(_power(-exponent), gl.SliceLayout(1, half_layout))
    half_smem.store(_scaled_pairs(half, factor, True))
    if W == 0:
        # Its products stand beside those of latent numbers that are 2**(VALUE_SHIFT - e) times too large
        factor = gl.convert_layout(_power(VALUE_SHIFT - exponent), gl.SliceLayout(1, rope_layout))
        rope_smem.store(_scaled_pairs(rope_smem.load(rope_layout), factor, False))
    fence_async_shared()
    mbarrier.arrive(ring.q_converted, count=1)
    mbarrier.wait(ring.q_converted, index & 1)
    return _power(exponent - VALUE_SHIFT)


@gluon.jit
def _start_latent(ring, raw, step, OTHER: gl.constexpr, CHUNK_NUMBER: gl.constexpr):
    """Start, or with OTHER go on with, q kᵀ of a tile of this partition: a chunk of its own half of the dims, or of the other.

    Its own half comes first.
    """
    slot, phase = _slot(step)
    half = 1 - slot if OTHER else slot
    place = slot * 2 + half
    _wait_latent(ring, place, phase, CHUNK_NUMBER)
    k = ring.latent_smem.index(place).reshape([TILE, HALF])
    q = ring.q_operand_smem.index(half).reshape([ROWS, HALF])
    if ring.chunk_smem is not None:
        k = k.slice(CHUNK_NUMBER * CHUNK, CHUNK, dim=1)
        q = q.slice(CHUNK_NUMBER * CHUNK, CHUNK, dim=1)
    return warpgroup_mma(q, k.permute((1, 0)), raw, use_acc=OTHER or CHUNK_NUMBER > 0, is_async=True)


@gluon.jit
def _start_rope(ring, raw, step, ROPE: gl.constexpr):
    """Go on with the rotary part, which comes with the other half's first chunk."""
    slot, phase = _slot(step)
    _wait_latent(ring, slot * 2 + 1 - slot, phase)
    k_rope = ring.rope_smem.index(slot).reshape([TILE, ROPE])
    return warpgroup_mma(ring.q_rope_smem.reshape([ROWS, ROPE]), k_rope.permute((1, 0)), raw, is_async=True)


@gluon.jit
def _start_given(ring, state, acc, step, exists, use_acc):
    """Take the reference of a tile that the other partition scores, and start acc + p c of that tile.

    Where there is none, the reference is that of no key, and the product is of anything: the next one must drop it.
    """
    slot, phase = _slot(step)
    mbarrier.wait(ring.p_ready.index(slot), phase, pred=exists)
    for chunk in gl.static_range(_chunks(ring.latent_ready)):
        _wait_latent(ring, slot * 2 + 1 - slot, phase, chunk, pred=exists)
    row_max = gl.where(exists, ring.max_smem.index(slot).load(state.row_max.type.layout), NEG_INF)
    state, correction = softmax.rebase(state, row_max)
    acc = columns.scaled_rarely(acc, correction)
    p = ring.p_smem.index(slot).reshape([ROWS, TILE])
    c = ring.latent_smem.index(slot * 2 + 1 - slot).reshape([TILE, HALF])
    return state, warpgroup_mma(p, c, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _absorb_tiles(ring, state, acc, step, first_step, end_step, masked, tile, limits, scale_log2, ROPE: gl.constexpr):
    """The tile before `step`, which the other partition scores, and that of `step`.

    scale_log2: for packed tokens one a row, else a number. The place of the tile before end_step is kept, for the result.
    """
    CHUNKS: gl.constexpr = _chunks(ring.latent_ready)
    has_given = step > first_step
    slot, _ = _slot(step)
    raw = gl.zeros([ROWS, TILE], gl.float32, columns.layout_of(TILE))
    for chunk in gl.static_range(CHUNKS):
        raw = _start_latent(ring, raw, step, False, chunk)
    # The given product: before the last chunk, so that p(i) does not wait long for p(i-1); where halves come at once before the
    # other one, so that its place is free sooner
    if CHUNKS == 1:
        state, product = _start_given(ring, state, acc, step - 1, has_given, step - 1 > first_step)
    if ROPE:
        raw = _start_rope(ring, raw, step, ROPE)
    for chunk in gl.static_range(CHUNKS - 1):
        raw = _start_latent(ring, raw, step, True, chunk)
    if CHUNKS > 1:
        state, product = _start_given(ring, state, acc, step - 1, has_given, step - 1 > first_step)
    raw = _start_latent(ring, raw, step, True, CHUNKS - 1)
    acc = warpgroup_mma_wait(2 if ROPE and CHUNKS == 1 else 1, deps=[product])
    mbarrier.arrive(ring.latent_free.index((1 - slot) * 2 + slot), count=1, pred=has_given)
    raw = warpgroup_mma_wait(0, deps=[raw])
    if ring.bias_smem is not None:
        raw += ring.bias_smem.index(slot).load(gl.SliceLayout(0, raw.type.layout))[None, :]
    elif masked:
        cols = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, raw.type.layout))
        raw = gl.where(cols[None, :] < limits[:, None], raw, NEG_INF)
    if ring.exponent_smem is None:
        state, p, correction = softmax.update_lazily_apart(state, raw, scale_log2)
    else:
        # Products of queries and keys, and values, are 2**-e of what they should be: weights are 2**e of what the sum takes
        e = gl.max(ring.exponent_smem.index(slot).load(ONE), 0)
        state, p, correction = softmax.update_lazily_scaled(state, raw, scale_log2, e)
    p = p.to(ring.latent_smem.dtype)
    ring.p_smem.index(slot).reshape([ROWS, TILE]).store(p)
    ring.max_smem.index(slot).store(state.row_max)
    fence_async_shared()
    mbarrier.arrive(ring.p_ready.index(slot), count=1)
    mbarrier.arrive(ring.q_free, count=1, pred=step + 2 >= end_step)
    acc = columns.scaled_rarely(acc, correction)
    c = ring.latent_smem.index(slot * 3).reshape([TILE, HALF])
    product = warpgroup_mma(columns.as_operand(p, acc), c, acc, use_acc=has_given, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(ring.latent_free.index(slot * 3), count=1, pred=step + 1 < end_step)
    return state, acc


@gluon.jit
def _join(ring, state, index, W: gl.constexpr):
    """The state of both partitions, whose reference is the same by now."""
    state = softmax.join(state)
    place = (index & 1) * 2
    ring.sum_smem.index(place + W).store(state.row_sum)
    mbarrier.arrive(ring.sum_ready.index(W), count=1)
    mbarrier.wait(ring.sum_ready.index(1 - W), index & 1)
    other = ring.sum_smem.index(place + 1 - W).load(state.row_sum.type.layout)
    return softmax.OnlineSoftmax(state.row_max, state.row_sum + other)


@gluon.jit
def _store(out_desc, lse, partial_out, partial_lse, sinks, smem, state, acc, segment, num_rows, num_heads,
           LSE_WITH_SINKS: gl.constexpr, UNIT_OF_ACC: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """Half of the columns of out, through smem, or of a partial result; partition 0 writes lse.

    smem: of the last tile, which a whole sequence has. Partial results, of fp32, fill sectors of memory from where they lie in
    registers; through shared memory they took longer.
    """
    row_layout: gl.constexpr = state.row_max.type.layout
    acc_layout: gl.constexpr = acc.type.layout
    m_row = gl.program_id(0) * ROWS
    rows = m_row + gl.arange(0, ROWS, row_layout)
    exists = rows < num_rows
    if segment.whole:
        inverse, row_lse = softmax.finish(state)
        if sinks is not None:
            sink = gl.load(sinks + rows % num_heads, mask=exists, other=NEG_INF).to(gl.float32)
            with_sink, correction = softmax.absorb_sink(state, sink)
            inverse, lse_with_sink = softmax.finish(with_sink)
            inverse = inverse * correction
            if LSE_WITH_SINKS:
                row_lse = lse_with_sink
        tile = reinterpret(smem, out_desc.dtype, smem.shape, smem.layout)
        tile.reshape([ROWS, HALF]).store((acc * columns.per_row(inverse * UNIT_OF_ACC, acc)).to(tile.dtype))
        fence_async_shared()
        partition_barrier()
        tma_store(out_desc, [segment.sequence, m_row, W * HALF], tile)
        if W == 0:
            gl.store(lse + segment.sequence.to(gl.int64) * num_rows + rows, row_lse, mask=exists)
        tma_store_wait(0)
    else:
        inverse, row_lse = softmax.finish(state)
        slot = schedule.partial_slot(gl.program_id(1), segment.first)
        acc_rows = m_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
        cols = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, acc_layout))
        slot_ptr = partial_out + slot.to(gl.int64) * num_rows * LATENT
        offsets = acc_rows[:, None] * LATENT + cols[None, :]
        gl.store(slot_ptr + offsets, acc * columns.per_row(inverse * UNIT_OF_ACC, acc), mask=(acc_rows < num_rows)[:, None])
        if W == 0:
            ptrs = (partial_lse + slot.to(gl.int64) * num_rows * LSE_COPIES) + rows * LSE_COPIES
            for copy in gl.static_range(LSE_COPIES):
                gl.store(ptrs + copy, row_lse, mask=exists)


@gluon.jit
def _compute(
    out_desc, lse, partial_out, partial_lse, sinks, ring, cache_seqlens, max_length, part, num_rows, num_heads,
    seqlen_q, scale_log2, SEQUENCES_PER_LENGTH: gl.constexpr, IS_CAUSAL: gl.constexpr, ROPE: gl.constexpr,
    LSE_WITH_SINKS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A consumer: every second tile's scores, and the output columns from W * HALF on."""
    score_layout: gl.constexpr = columns.layout_of(TILE)
    acc_layout: gl.constexpr = columns.layout_of(HALF)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    begin, begin_tile, last, end_tile = part
    tokens = (gl.program_id(0) * ROWS + gl.arange(0, ROWS, row_layout)) // num_heads
    first_step = 0
    for index in range(last - begin + 1):
        segment = _segment(cache_seqlens, part, index, max_length, SEQUENCES_PER_LENGTH)
        limits = gl.full([ROWS], 0, gl.int32, row_layout) + segment.length
        mask_from = segment.length
        if IS_CAUSAL:
            limits = limits - seqlen_q + 1 + tokens
            mask_from = mask_from - seqlen_q + 1
        state = softmax.nothing_apart(gl.zeros([ROWS, TILE], gl.float32, score_layout))
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        end_step = first_step + segment.end - segment.first
        own_step = first_step + ((first_step + W) & 1)
        mbarrier.wait(ring.q_ready, index & 1)
        scale = scale_log2
        if ring.exponent_smem is not None:
            scale = scale * _convert_queries(ring, index, row_layout, W)
        mbarrier.arrive(ring.q_free, count=1, pred=own_step >= end_step)
        for step in range(own_step, end_step, 2):
            tile = segment.first + step - first_step
            masked = (tile + 1) * TILE > mask_from
            state, acc = _absorb_tiles(ring, state, acc, step, first_step, end_step, masked, tile, limits, scale, ROPE)
        if (end_step > first_step) & (((end_step - 1 + W) & 1) == 1):
            state, product = _start_given(ring, state, acc, end_step - 1, True, end_step - 1 > first_step)
            acc = warpgroup_mma_wait(0, deps=[product])
        state = _join(ring, state, index, W)
        place = ((end_step - 1) & 1) * 2 + W
        _store(out_desc, lse, partial_out, partial_lse, sinks, ring.latent_smem.index(place), state, acc, segment, num_rows,
               num_heads, LSE_WITH_SINKS, 1.0 if ring.exponent_smem is None else VALUE_UNIT, W)  # fmt: skip
        mbarrier.arrive(ring.latent_free.index(place), count=1, pred=end_step > first_step)
        first_step = end_step


@gluon.jit
def _allocate(desc, NUMBER: gl.constexpr, dtype: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [NUMBER] + desc.block_type.shape, desc.layout)


@gluon.jit
def _produce(q_desc, q_rope_desc, latent_desc, rope_desc, ring, keys, lengths, max_length, part, TILES_PER_PAGE: gl.constexpr,
             SEQUENCES_PER_LENGTH: gl.constexpr, ROPE: gl.constexpr, PREFETCH: gl.constexpr):  # fmt: skip
    if latent_desc is not None:
        _load(q_desc, q_rope_desc, latent_desc, rope_desc, ring, keys, lengths, max_length, part, TILES_PER_PAGE, ROPE,
              PREFETCH)  # fmt: skip
    else:
        # The first queries come while tokens are looked up; those of other sequences have no place so early
        begin, _, last, _ = part
        if begin <= last:
            _load_queries(q_desc, q_rope_desc, ring, begin, 0, ROPE)
        if keys.scales is None:
            _gather(q_desc, q_rope_desc, ring, keys, lengths, max_length, part, SEQUENCES_PER_LENGTH, ROPE)
        else:
            _gather_packed(q_desc, q_rope_desc, ring, keys, lengths, max_length, part, SEQUENCES_PER_LENGTH, ROPE)


@gluon.jit(do_not_specialize=["num_slots", "entry_stride", "max_length", "num_sequences", "num_rows", "seqlen_q"])
def decode(
    q_desc, q_rope_desc, latent_desc, rope_desc, keys, num_slots, entry_stride, out_desc, lse, partial_out, partial_lse, table,
    lengths, sinks, softmax_scale, max_length, num_sequences, num_rows, num_heads, seqlen_q, TILES_PER_PAGE: gl.constexpr,
    SEQUENCES_PER_LENGTH: gl.constexpr, IS_CAUSAL: gl.constexpr, ROPE: gl.constexpr, LSE_WITH_SINKS: gl.constexpr,
    SPARSE: gl.constexpr, PREFETCH: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of `Call.start_decode`; pointers: lse, partial_out (slots, num_rows, 512), partial_lse with LSE_COPIES a row.

    latent_desc, rope_desc: of the cache; None where tokens are gathered. keys, num_slots, entry_stride: of `portable.Keys`.
    table: of schedule.py. lengths: int32, one for SEQUENCES_PER_LENGTH sequences each, or None: max_length, which bounds them
    anyway. ROPE: 64, or 0 for a head dim of 512. PREFETCH: bring tiles to L2 before TMA asks for them. REGISTERS: of a
    consumer's thread.
    """
    # The merge waits for all of this kernel, but may be loaded meanwhile
    chain.allow()
    keys = portable.Keys(*keys, num_slots, entry_stride)
    part = schedule.part_of_program(table, gl.program_id(1), num_sequences)
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype if keys.scales is None else gl.float16
    bias_smem = None
    if SPARSE:
        bias_smem = gl.allocate_shared_memory(gl.float32, [2, TILE], vectors)
    exponent_smem = None
    q_max_smem = None
    scale_smem = None
    entry_smem = None
    if keys.scales is not None:
        exponent_smem = gl.allocate_shared_memory(gl.float32, [2, 1], vectors)
        q_max_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], vectors)
        entry_smem = gl.allocate_shared_memory(gl.int32, [TILE], vectors)
        scale_smem = gl.allocate_shared_memory(gl.int64, [2, 2 * TILE], vectors)
    if latent_desc is None:
        # Each thread's copies arrive once, and the partition once
        other_ready: gl.constexpr = 129
        own_ready: gl.constexpr = 129 if keys.scales is None else 1
        latent_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(2):
            mbarrier.init(latent_ready.index(slot * 3), count=own_ready)
            mbarrier.init(latent_ready.index(slot + 1), count=other_ready)
    else:
        latent_ready = allocate_barriers(4 * HALF // CHUNK, 1)
    q_smem = _allocate(q_desc, 2, q_desc.dtype)
    q_rope_smem = _allocate(q_rope_desc, 1, q_rope_desc.dtype).index(0)
    rope_smem = _allocate(q_rope_desc, 2, q_rope_desc.dtype)
    q_operand_smem, p_smem = q_smem, rope_smem
    if keys.scales is not None:
        q_operand_smem = reinterpret(q_smem, dtype, q_smem.shape, q_smem.layout)
        p_smem = reinterpret(rope_smem, dtype, rope_smem.shape, rope_smem.layout)
    latent_smem = _allocate(q_desc, 4, dtype)
    chunk_smem = None
    if latent_desc is not None:
        chunk_smem = reinterpret(latent_smem, dtype, [4 * HALF // CHUNK] + latent_desc.block_type.shape, latent_desc.layout)
    ring = Ring(
        q_smem, q_operand_smem, q_rope_smem, latent_smem, rope_smem, p_smem,
        gl.allocate_shared_memory(gl.float32, [2, ROWS], vectors), gl.allocate_shared_memory(gl.float32, [4, ROWS], vectors),
        bias_smem, exponent_smem, q_max_smem, scale_smem, entry_smem, allocate_barriers(1, 1).index(0),
        allocate_barriers(1, 2).index(0), allocate_barriers(1, 2).index(0), allocate_barriers(1, 2).index(0), latent_ready,
        allocate_barriers(4, 1), allocate_barriers(2, 1), allocate_barriers(2, 1), chunk_smem,
    )  # fmt: skip
    scale_log2 = softmax_scale * LOG2_E
    # What gathers tokens has the registers that are left
    specialize([
        (latent_desc is None, _produce, (q_desc, q_rope_desc, latent_desc, rope_desc, ring, keys, lengths, max_length, part,
                                         TILES_PER_PAGE, SEQUENCES_PER_LENGTH, ROPE, PREFETCH), 4, LOAD_REGISTERS),
        (2, _compute, (out_desc, lse, partial_out, partial_lse, sinks, ring, lengths, max_length, part, num_rows, num_heads,
                       seqlen_q, scale_log2, SEQUENCES_PER_LENGTH, IS_CAUSAL, ROPE, LSE_WITH_SINKS), 4, REGISTERS),
        (latent_desc is not None, _produce, (q_desc, q_rope_desc, latent_desc, rope_desc, ring, keys, lengths, max_length, part,
                                             TILES_PER_PAGE, SEQUENCES_PER_LENGTH, ROPE, PREFETCH), 1, LOAD_REGISTERS),
    ])  # fmt: skip


def refuses(problem, device) -> str | None:
    """Why this kernel does not take a problem, or None."""
    if device.sm != 90:
        return f"needs sm_90 (H100, H200, H800), the device is {device.arch}"
    if problem.num_heads_kv != 1:
        return f"takes one latent head, not {problem.num_heads_kv}"
    if problem.softmax_scale <= 0:
        return "takes a positive softmax_scale"
    if problem.fp8 and problem.dtype != torch.bfloat16:
        return f"takes packed caches for bfloat16 queries, not {problem.dtype}"
    if problem.unaligned:
        return "needs a kv_cache whose rows begin at multiples of 16 bytes"
    if _gathers(problem) and problem.cache_bytes >= MAX_GATHERED_BYTES:
        return "looks up tokens in caches of less than 32 GiB, but pages that are multiples of 64 tokens in larger ones"
    return None


def _gathers(problem) -> bool:
    """Whether tokens are looked up one by one; else TMA loads tiles of them."""
    return problem.sparse or problem.fp8 or problem.page_size % TILE.value > 0


def config_of(problem, device) -> None:
    """No choice of tiles."""


def _layout(block, x):
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)


def cache_descriptor(kv_cache, columns):
    """TMA descriptor of a paged cache, (pages, page_size, 1, dim), whose tiles end after any number of tokens.

    TMA fills with zeros what is past the size of a dim. Token i of n from `row` of a page on is given coordinates that end at
    MANY_ROWS: (MANY_ROWS, row + n, page, MANY_ROWS - n + i, column). With strides 2**34 - s, s, page stride, s its offset is
    2**64 + page * page stride + (row + i) * s, and addresses have 64 bits.
    """
    pages, _, _, dim = kv_cache.shape
    page_stride, row_stride = kv_cache.stride()[:2]
    block = [1, 1, 1, TILE.value, columns]
    many = MANY_ROWS.value
    return TensorDescriptor(kv_cache, [2**31 - 65536, 2**31 - 65536, pages, many, dim],
                            [2**34 - row_stride, row_stride, page_stride, row_stride, 1], block,
                            _layout(block, kv_cache))  # fmt: skip


def rows_descriptor(x, rows, columns):
    """TMA descriptor of queries, or of out. rows: their view (sequences, rows, dim)."""
    block = [1, ROWS.value, columns]
    return TensorDescriptor(x, list(rows.shape), list(rows.stride()), block, _layout(block, x))


class Call(portable.Call):
    """The same launches with this tier's kernel."""

    DEPENDENT = True

    def _rows(self, x):
        return x.reshape(self.problem.num_sequences, self.problem.num_rows, x.shape[-1])

    def must_copy(self, q) -> bool:
        rows = self._rows(q)
        return rows.data_ptr() != q.data_ptr() or q.data_ptr() % 16 != 0 or any(stride % 8 for stride in rows.stride()[:2])

    def orders_indices(self) -> bool:
        problem = self.problem
        tokens = problem.num_sequences * problem.topk * -(-problem.num_rows // ROWS.value)
        return (problem.fp8 and problem.topk <= order.MAX_TOPK and problem.cache_bytes >= ORDERED_BYTES
                and tokens >= ORDERED_TOKENS)  # fmt: skip

    def parts_of(self, kv_cache):
        """The cache, its bytes, and nothing."""
        return kv_cache, kv_cache.view(torch.uint8), None

    def start_decode(self, launch, x, partial_out, partial_lse):
        problem, q, kv_cache = self.problem, x.q, x.latent
        gathers = _gathers(problem)
        rows = self._rows(q)
        descriptors = rows_descriptor(q, rows, HALF.value), rows_descriptor(q, rows, cache.ROPE_DIM)
        if gathers:
            descriptors += None, None
        else:
            descriptors += cache_descriptor(kv_cache, CHUNK.value), cache_descriptor(kv_cache, cache.ROPE_DIM)
        # Whole tokens as the latent part, in bytes; scales are not None where they are packed
        tokens = portable.rows_of(x.scales)
        keys = self.keys_of(tokens, tokens if problem.fp8 else None, None, x)
        constexprs = {"TILES_PER_PAGE": problem.page_size // TILE.value,
                      "SEQUENCES_PER_LENGTH": problem.seqlen_q if problem.sparse else 1, "IS_CAUSAL": problem.causal,
                      "ROPE": problem.head_dim - problem.head_dim_v, "LSE_WITH_SINKS": problem.lse_with_sinks,
                      "SPARSE": problem.sparse, "PREFETCH": problem.num_rows > ROWS.value,
                      "REGISTERS": REGISTERS_GATHERING if gathers else REGISTERS}  # fmt: skip
        launch(
            decode, (-(-problem.num_rows // ROWS.value), self.num_parts),
            (*descriptors, *keys, rows_descriptor(x.out, self._rows(x.out), HALF.value), x.lse, partial_out, partial_lse,
             x.table, x.lengths, x.sinks, problem.softmax_scale, self.max_length, problem.num_sequences, problem.num_rows,
             problem.num_heads, problem.seqlen_q),
            constexprs, num_warps=4,
        )  # fmt: skip


bind = Call
