"""Read before any test imports torch.

OpenMP's threads sleep at their barriers: beside another busy process, as a learner beside an engine is,
threads that spin there wait for each other's time slices, and small products become ten times slower.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# How long an example takes says how busy the machine is: on a full one any may take a second now and then.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
