"""flash_attn.ops: the rotation alone.

Its folder triton is called triton_ here: a script beside a folder called triton would find that instead of Triton.
"""

from flashtile.compat.flash_attn.ops import triton_ as triton

__all__ = ["triton"]
