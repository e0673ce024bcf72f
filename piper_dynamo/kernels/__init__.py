"""Triton kernels of Piper's own: only what nothing fused exists for, each beside what it computes.

    rows.py    tokens to experts and back, weighed
    pack.py    many values as one, cast and scaled, and back

Every function takes any device: on CUDA, where Triton is installed, it runs the kernel; elsewhere
its reference, written in torch in the same file.
"""
