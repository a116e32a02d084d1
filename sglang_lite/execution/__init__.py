"""From a step plan to tensors and back: the KV pool, the model runner, the sampler, the worker thread."""
