"""Memory that one kernel uses: of a stream, whose kernels run one by one, and kept for its next one.

Not for what a kernel hands to the next: another thread may launch its own between the two. A captured call has memory of its
own, for its graph may be replayed on any stream. On a CPU all is allocated anew.
"""

import torch

# int32 of a device for the counters of captured calls, 4 MiB: of the decode kernel, some 4000 calls
RESERVED = 1 << 20
# By device and stream
_counters = {}
_floats = {}
# By device: (RESERVED,) of 0, and how many of them captured calls have
_reserves = {}


def counters(x, size):
    """int32 (size,) or longer, of 0, on x's device, for a kernel that leaves them 0.

    A captured call has some of the reserve that the first call on a device makes, whose 0 it waits for, once in a process.
    Without that call, or where the reserve is used up, the graph sets them to 0 itself, which takes it 1 us.
    """
    if not x.is_cuda:
        return x.new_zeros(size, dtype=torch.int32)
    index = x.get_device()
    if torch.cuda.is_current_stream_capturing():
        return _reserved(x, index, size)
    key = index, torch._C._cuda_getCurrentRawStream(index)
    kept = _counters.get(key)
    if kept is None or len(kept) < size:
        kept = _counters[key] = x.new_zeros(size, dtype=torch.int32)
        if index not in _reserves:
            _reserves[index] = [x.new_zeros(RESERVED, dtype=torch.int32), 0]
            torch.cuda.current_stream(index).synchronize()
    return kept


def _reserved(x, index, size):
    memory, begin = _reserves.get(index, (None, RESERVED))
    # Of cache lines of its own
    end = begin + -(-size // 32) * 32
    if end > RESERVED:
        return x.new_zeros(size, dtype=torch.int32)
    _reserves[index][1] = end
    return memory[begin : begin + size]


def floats(x, size):
    """fp32 (size,) or longer, on x's device, of any values."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return x.new_empty(size, dtype=torch.float32)
    index = x.get_device()
    key = index, torch._C._cuda_getCurrentRawStream(index)
    kept = _floats.get(key)
    if kept is None or len(kept) < size:
        kept = _floats[key] = x.new_empty(size, dtype=torch.float32)
    return kept
