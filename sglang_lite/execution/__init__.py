"""From a step plan to tensors and back: the KV pool, the model runner, the sampler, the worker thread."""

import os

# Torch's threads wait for each other by spinning, for ever unless told otherwise before torch is loaded. When anything
# else runs on the processors (the front process, for one), a spinning thread keeps the one it waits for from running: a
# decode step on two busy cores was measured at 1,650 ms spinning and 47 ms sleeping. Threads that sleep at once wake up
# late, a hundred times a step. This count spins for about half a millisecond, longer than from one product to the next:
# a step of one row took 32 to 37 ms with it and 37 to 46 ms with a fiftieth of it; beside two other busy processes, 150
# and 88 ms. GOMP_SPINCOUNT in the environment wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")
