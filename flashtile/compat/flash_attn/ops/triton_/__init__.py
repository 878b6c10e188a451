"""flash_attn.ops.triton: the rotation alone."""
