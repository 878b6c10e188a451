"""Which keys a query sees, per element and per tile: the window around the bottom-right diagonal.

Query i sees key j when  i + shift - left <= j <= i + shift + right,  shift = seqlen_k - seqlen_q.
"""


def visible(rows, cols, shift, window):
    """Mask of queries `rows` against keys `cols`, which broadcast against each other; None where the window hides nothing."""
    left, right = window
    mask = None
    if left is not None:
        mask = cols >= rows + shift - left
    if right is not None:
        before_right = cols <= rows + shift + right
        mask = before_right if mask is None else mask & before_right
    return mask


def key_range(rows: slice, seqs) -> slice:
    """Keys that some query of `rows` sees; may be empty."""
    left, right = seqs.problem.window
    start = 0 if left is None else max(0, rows.start + seqs.shift - left)
    stop = seqs.seqlen_k if right is None else min(seqs.seqlen_k, rows.stop + seqs.shift + right)
    return slice(start, max(start, stop))


def query_range(cols: slice, seqs) -> slice:
    """Queries that see some key of `cols`; may be empty."""
    left, right = seqs.problem.window
    start = 0 if right is None else max(0, cols.start - seqs.shift - right)
    stop = seqs.seqlen_q if left is None else min(seqs.seqlen_q, cols.stop - seqs.shift + left)
    return slice(start, max(start, stop))
