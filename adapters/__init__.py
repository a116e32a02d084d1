"""Typed operations on tensors: protocols in ``base``, a torch implementation in ``cpu``, wheels in ``cuda``.

Adapters know no model names and choose no backend; whoever builds a runtime passes one in.
"""
