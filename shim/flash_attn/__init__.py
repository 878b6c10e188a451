"""Not flash-attn: the name, answered by flashtile.compat.flash_attn."""

from flashtile.compat import answer_to

answer_to("flash_attn")
