"""flashtile inside other libraries: transformers, and torch's scaled_dot_product_attention. Nothing is active on import."""

from flashtile import lazy

__getattr__ = lazy.modules(__name__, "sdpa", "transformers")
