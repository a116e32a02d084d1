"""Building blocks shared by the model families. They know tensors and operations, no checkpoint and no config."""
