"""Predict what bounds a call, and how fast it can be at best; then measure.

FLOPs: those of the matrix products, on the (query, key) pairs that the mask leaves (causal, bottom-right). Bytes:
each operand read once, out and lse (4 bytes a row and head) written once. The floor is the longer of the two times.
The check compares your predictions for a prefill, a chunk of one, a decode step and a short batch on an H200, then
measures one call on this machine, and shows how far it is from your floor.

Guide: part 1, "The roofline first". Done when: the predictions agree with `flashtile explain`.
"""


def flops(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, causal: bool) -> int:
    """FLOPs of the two products; seqlen_q <= seqlen_k."""
    raise NotImplementedError


def bytes_moved(batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, head_dim: int, itemsize: int) -> int:
    """Bytes to and from memory at least."""
    raise NotImplementedError


def floor(num_flops: int, num_bytes: int, tflops: float, bandwidth: float) -> tuple[str, float]:
    """("compute" or "memory", milliseconds at least) on a device of so many TFLOP/s and bytes/s."""
    raise NotImplementedError
