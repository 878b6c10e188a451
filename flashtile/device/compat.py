"""What differs between Triton 3.6, 3.7, 3.8 and 3.9, in one place: Gluon's names for barriers, TMA copies and descriptors.

Kernels take these names from here and nothing that is versioned from Triton itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# 3.6 calls it thread_barrier
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# From 3.8 on; 3.9 has no other names
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# From 3.9 on, which has no other name
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# Shared memory as another dtype, shape and layout: a method, which 3.9 has made public
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

__all__ = [
    "TensorDescriptor", "async_copy", "builtin", "copy_async", "fence_async_shared", "gl", "gluon", "mbarrier",
    "partition_barrier", "reinterpret", "tma_load", "tma_store", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
