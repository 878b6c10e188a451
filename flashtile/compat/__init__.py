"""The peers' names, signatures and conventions, each a thin module over flashtile.api: flash_attn is FlashAttention 2."""
