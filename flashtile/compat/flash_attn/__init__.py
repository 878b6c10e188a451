"""FlashAttention 2's package: its functions, and the modules that programs import from it.

    from flashtile.compat.flash_attn import flash_attn_func          # for: from flash_attn import flash_attn_func
    from flashtile.compat.flash_attn.bert_padding import pad_input   # for: from flash_attn.bert_padding import pad_input

`flashtile.compat.install()` lets the names on the right resolve to these.
"""

from flashtile.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The release whose functions these are
__version__ = "2.8.3"

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip
