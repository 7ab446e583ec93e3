"""Kernels for CPUs, compiled by numba when first used: two-byte weights, and attention that reads the paged pool."""
