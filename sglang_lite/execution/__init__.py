"""From a step plan to tensors and back: the KV pool, the model runner, the sampler, the worker thread."""

import os

# Torch's threads wait for each other by spinning, for ever unless told otherwise before torch is loaded. When anything
# else runs on the processors (the front process, for one), a spinning thread keeps the one it waits for from running: a
# decode step on two busy cores was measured at 1,650 ms spinning and 47 ms sleeping. Threads that sleep at once wake up
# late, a hundred times a step. This count spins for some tens of microseconds, about the time between two operations.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")
