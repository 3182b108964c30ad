"""`dtool::FusedAttention` as a TensorRT plugin: one C++ library with the attention kernels inside.

`build` makes the library from specs and target devices, `entry` calls its kernels from torch without
TensorRT, `native` holds the C++ sources.
"""
