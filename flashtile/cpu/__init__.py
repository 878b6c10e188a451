"""The tiers of CPU tensors: torch's own attention where its semantics match, else FlashAttention-2 in PyTorch."""
