"""The operations on CUDA devices, through the published kernel wheels.

Importing this package imports no wheel: ``sgl_kernel`` and ``flashinfer`` are loaded when ``CudaOperations`` is built.
"""
