"""The tiers of CPU tensors: torch's own attention where its semantics match (sdpa), else FlashAttention-2 in PyTorch (tiled)."""
