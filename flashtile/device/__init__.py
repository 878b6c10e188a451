"""Device functions that every kernel shares, in Triton and in Gluon; imports only triton.

State is a NamedTuple, behaviour is free functions: that runs in Triton, in Gluon and in the CPU interpreter alike.
"""
