"""Random words as kernels make them, in Triton's interpreter, against the reference."""

import importlib.util

import pytest
import torch

from flashtile import settings
from flashtile.reference import dropout as reference

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(not settings.triton_interprets(), reason="needs TRITON_INTERPRET=1"),
]

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from flashtile.device import dropout

    @triton.jit
    def _write_words(out, state, row_begin, col_begin, head_id):
        stream = dropout.load_stream(dropout.Dropout(state, 0, 1.0), head_id)
        words = dropout.philox((row_begin + tl.arange(0, 8))[:, None], (col_begin + tl.arange(0, 16))[None, :], stream)
        place = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
        for i in tl.static_range(4):
            tl.store(out + 128 * i + place, words[i].to(tl.int64))


def test_words():
    seed, offset = 0x1234_5678_9ABC_DEF0, 0xFEDC_BA98
    out = torch.empty(4, 8, 16, dtype=torch.int64)
    _write_words[(1,)](out, torch.tensor([seed, offset]), 2**20, 2**28, 5)
    rows, cols = 2**20 + torch.arange(8)[:, None], 2**28 + torch.arange(16)[None, :]
    words = reference.philox((rows, cols, torch.tensor(5), torch.tensor(offset)), (seed & reference.WORD, seed >> 32))
    assert torch.equal(out, torch.stack(torch.broadcast_tensors(*words)))
