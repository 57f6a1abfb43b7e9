"""Read before any test imports torch.

OpenMP's threads sleep at their barriers: beside another busy process, as a learner beside an engine is,
threads that spin there wait for each other's time slices, and small products become ten times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
