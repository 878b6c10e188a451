"""TMA descriptors of the Hopper tier: which elements a tile at given coordinates holds, by the arithmetic of the hardware."""

import importlib.util
from itertools import product

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS, DIM = 64, 128


def elements(descriptor, coordinates):
    """Offsets of a tile's elements in their tensor, flat, -1 where TMA fills in zeros; addresses have 64 bits."""
    offsets = []
    for inner in product(*map(range, descriptor.block_shape)):
        place = [at + i for at, i in zip(coordinates, inner)]
        inside = all(0 <= i < size for i, size in zip(place, descriptor.shape))
        offset = sum(i * stride * 2 for i, stride in zip(place, descriptor.strides)) % 2**64 // 2
        offsets.append(offset if inside else -1)
    return torch.tensor(offsets)


def numbered(*shape):
    """The offsets of a tensor's elements, and a tensor of that layout without data."""
    return torch.arange(torch.Size(shape).numel()).view(shape), torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("heads", [1, 4])
def test_tiles_of_sequences(heads):
    """One head's rows, or as many queries of each head of a group, side by side; nothing past the last row."""
    from flashtile.hopper.arguments import descriptor

    batch, seqlen, num_heads = 2, 100, 8
    offsets, x = numbered(batch, seqlen, num_heads, DIM)
    described = descriptor(x, ROWS, DIM, heads)
    b, first_head, row = 1, 4, 80
    if heads == 1:
        expected = offsets[b, row : row + ROWS, first_head]
        tile = elements(described, [b, first_head, row, 0])
    else:
        expected = offsets[b, row : row + ROWS // heads, first_head : first_head + heads]
        tile = elements(described, [b, row, first_head, 0])
    assert torch.equal(tile[tile >= 0], expected.flatten())
    assert (tile[expected.numel() :] == -1).all() and len(tile) == ROWS * DIM


@pytest.mark.parametrize("heads", [1, 4])
def test_tiles_of_packed_sequences(heads):
    """As above; a tile ends where its sequence ends, though rows of the next one follow."""
    from flashtile.hopper.arguments import PACKED_ROWS, packed_descriptor

    total, num_heads, start, length, row, first_head = 120, 8, 7, 90, 80, 4
    offsets, x = numbered(total, num_heads, DIM)
    described = packed_descriptor(x, ROWS, DIM, heads)
    queries = ROWS // heads
    rows = offsets[start + row : start + min(row + queries, length)]
    place = [PACKED_ROWS, start + length]
    if heads == 1:
        expected, inner = rows[:, first_head], [first_head, PACKED_ROWS - length + row, 0]
    else:
        expected, inner = rows[:, first_head : first_head + heads], [PACKED_ROWS - length + row, first_head, 0]
    tile = elements(described, place + inner)
    assert torch.equal(tile[tile >= 0], expected.flatten())
    assert (tile[expected.numel() :] == -1).all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("totals", "lengths", "refused"), [
    ((2**31 - 65536,) * 2, (2**30,) * 2, False), ((9, 2**31 - 65535), (9, 9), True), ((2**31 - 65535, 9), (9, 9), True),
    ((2**30 + 1,) * 2, (9, 2**30 + 1), True), ((2**30 + 1,) * 2, (2**30 + 1, 9), True),
])  # fmt: skip
def test_rows_that_tma_cannot_count_are_refused(totals, lengths, refused, direction):
    """A tile of theirs would be zeros, and its results stored nowhere."""
    from flashtile import hardware, hopper
    from flashtile.problem import AttentionProblem

    problem = AttentionProblem(1, *lengths, 1, 1, 64, 64, torch.bfloat16, softmax_scale=0.1, window=(None, None),
                               total_q=totals[0], total_k=totals[1])  # fmt: skip
    reason = hopper.refuses(problem, hardware.by_name("H200"), direction)
    assert ("TMA counts at most" in (reason or "")) == refused


def test_boxes_of_pages():
    """A box of a page has its rows up to where the sequence ends; pages may lie further apart than their rows."""
    from flashtile.hopper.arguments import PACKED_ROWS, packed_descriptor

    pages, page_size, num_heads, rows, columns = 5, 32, 4, 16, 64
    offsets, both = numbered(pages, 2, page_size, num_heads, DIM)
    described = packed_descriptor(both[:, 1], rows, columns)
    page, slot, head, length = 3, 16, 2, 9
    start = page * 2 * page_size + slot
    tile = elements(described, [PACKED_ROWS, start + length, head, PACKED_ROWS - length, 64])
    expected = offsets[page, 1, slot : slot + length, head, 64:] - offsets[0, 1, 0, 0, 0]
    assert torch.equal(tile[tile >= 0], expected.flatten())
    assert (tile[expected.numel() :] == -1).all() and len(tile) == rows * columns
    # A page without a visible key is not read
    assert (elements(described, [PACKED_ROWS, start, head, PACKED_ROWS, 64]) == -1).all()


@pytest.mark.parametrize("window", [(None, 0), (50, 0), (None, 128), (None, None)])
@pytest.mark.parametrize(
    "lengths", [(256, 256), (300, 300), (300, 428), (428, 300), (200, 256), (129, 1), (2048, 2048), (2304, 2304)]
)
def test_who_sees_half_of_a_first_tile(lengths, window):
    """No query of a tile's first rows sees the right half of their first key tile, where that is left out."""
    from flashtile.hopper import arguments
    from flashtile.problem import AttentionProblem
    from flashtile.tiles import HopperConfig

    seqlen_q, seqlen_k = lengths
    problem = AttentionProblem(1, seqlen_q, seqlen_k, 2, 2, DIM, DIM, torch.bfloat16, softmax_scale=1.0, window=window)
    assert not arguments._half_first(problem, HopperConfig(128, 64, 4, 0))
    config = HopperConfig(128, 128, 2, 0)
    half = arguments._half_first(problem, config)
    assert half == (window[1] == 0 and lengths != (200, 256))
    # And who has its turn first has the last rows, in long calls
    assert arguments._last_rows_first(problem, config) == (half and (seqlen_k > 1024 or window[0] is not None))
    left, right = window
    shift = seqlen_k - seqlen_q
    for first in range(0, seqlen_q, config.tile_m) if half else ():
        rows = range(first, min(first + ROWS, seqlen_q))
        first_key = max(0, first + shift - (seqlen_k if left is None else left))
        seen = range(first_key, min(rows[-1] + shift + right + 1, seqlen_k))
        last_tile = max(seen, default=0) // config.tile_n
        assert not any(key % config.tile_n >= config.tile_n // 2 for key in seen if key // config.tile_n == last_tile)


@pytest.mark.parametrize(
    "window", [(127, 0), (128, 0), (191, 0), (192, 0), (130, 0), (60, 0), (255, 64), (255, 30), (128, None)]
)
@pytest.mark.parametrize("lengths", [(256, 256), (300, 300), (300, 428), (300, 364), (428, 300), (129, 1), (700, 700)])
@pytest.mark.parametrize("tile", [(128, 64), (256, 64), (128, 128)])
def test_which_tiles_a_left_edge_cuts(lengths, window, tile):
    """Of a consumer only the last tile, and not the first; half of it where the other half is left out."""
    from flashtile.hopper import arguments
    from flashtile.problem import AttentionProblem
    from flashtile.tiles import HopperConfig

    (seqlen_q, seqlen_k), (left, right) = lengths, window
    shift, right = seqlen_k - seqlen_q, seqlen_k if right is None else right
    problem = AttentionProblem(1, *lengths, 2, 2, DIM, DIM, torch.bfloat16, softmax_scale=1.0, window=window)
    config = HopperConfig(*tile, 4, 0)
    cut, half = arguments._cut_last(problem, config), arguments._half_last(problem, config)
    tile_n = config.tile_n
    assert cut == (shift >= 0 and left >= tile_n - 1 and (shift - left) % ROWS in (0, 1))
    assert (half >= 0) == (cut and tile == (128, 128))
    for first in range(0, seqlen_q, ROWS) if cut else ():
        last = min(first + ROWS, seqlen_q) - 1
        begin, end = max(0, first + shift - left), min(last + shift + right + 1, seqlen_k)
        hidden = [key for key in range(begin, end) if key < last + shift - left]
        if not hidden:
            continue
        (tile,) = {key // tile_n for key in hidden}
        assert tile == begin // tile_n < (end - 1) // tile_n
        # No key of it lies right of the diagonal's side of the window
        assert (tile + 1) * tile_n <= min(first + shift + right + 1, seqlen_k)
        if half == first // ROWS % 2:
            assert begin % tile_n >= tile_n // 2
        elif half >= 0:
            assert hidden[-1] % tile_n < tile_n // 2
