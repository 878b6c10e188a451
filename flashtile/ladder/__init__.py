"""The ladder: attention in CUDA C++, one file and one idea a rung, from three naive kernels to tensor cores fed by cp.async.

    rungs.py      the table: what each rung adds, takes and costs; read this first
    rungNN_*.cu   the rungs; each says its idea, its cost and its arguments at the top
    ptx.cuh       the instructions that CUDA C++ has no words for
    launch.py     forward(5, q, k, v), backward(9, ...): from tensors to a rung's kernels
    nvrtc.py      from source to a kernel; the only file that knows NVRTC

Rungs 10 and 11 are the package's own tiers. They are for learning: `flashtile.attention` never takes rungs 1 to 9.
Needs the extra: pip install 'flashtile[ladder]'.
"""
