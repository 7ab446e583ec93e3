"""Triton kernels, each beside its torch twin."""
