"""Numbers in which programs of a kernel count, 0 when it begins; it leaves them 0, so that nobody has to clear them again."""

from threading import Lock

import torch

# int32 of a device for captured calls, 4 MiB: 32,000 calls
RESERVED = 1 << 20
# (counters, how many) by device and stream
_of_stream = {}
# By device: (RESERVED,) of 0, and how many of them captured calls have
_reserves = {}
# Threads may capture at the same time
_lock = Lock()


def zeros(x, size):
    """int32 (size,) or longer, of 0, on x's device, for one kernel that leaves them so.

    Kernels of one stream share them: they run one by one. A captured call has some of its own, for its graph may be replayed
    on any stream: of the reserve that the first call on a device makes, whose 0 it waits for, once in a process. Without that
    call, or where the reserve is used up, the graph sets them to 0 itself, in one node more. On a CPU they are new.
    """
    if not x.is_cuda:
        return x.new_zeros(size, dtype=torch.int32)
    index = x.get_device()
    if torch.cuda.is_current_stream_capturing():
        return _reserved(x, index, size)
    return of_stream(x, index, torch._C._cuda_getCurrentRawStream(index), size)


def of_stream(x, index, stream, size):
    """`zeros` of a stream that is not being captured."""
    kept, length = _of_stream.get((index, stream), (None, -1))
    if length < size:
        kept, length = _of_stream[index, stream] = x.new_zeros(size, dtype=torch.int32), size
        if index not in _reserves:
            _reserves[index] = [x.new_zeros(RESERVED, dtype=torch.int32), 0]
            torch.cuda.current_stream(index).synchronize()
    return kept


def _reserved(x, index, size):
    with _lock:
        memory, begin = _reserves.get(index, (None, RESERVED))
        # Of cache lines of its own
        end = begin + -(-size // 32) * 32
        if end <= RESERVED:
            _reserves[index][1] = end
            return memory[begin : begin + size]
    return x.new_zeros(size, dtype=torch.int32)
