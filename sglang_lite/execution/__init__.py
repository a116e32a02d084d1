"""From a step plan to tensors and back: the KV pool, the model runner, the sampler, the worker thread."""

import os

# Torch's threads wait for each other by spinning, unless told otherwise before torch is loaded. When anything else runs
# on the processors (the front process, for one), a spinning thread keeps the one it waits for from running: a decode
# step on two busy cores was measured at 1,650 ms spinning and 47 ms sleeping.
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
