"""Model families, checkpoints and what is known of a model before its weights are read.

Importing this package, ``description``, ``repository``, ``checkpoint`` or ``registry`` does not import torch.
"""
