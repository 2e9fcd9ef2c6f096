"""Settings for all tests."""

import os

import torch
from hypothesis import settings

# Tests run side by side (pytest-xdist), and the nets are tiny: more threads only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines differ in speed, and a timeout is not a counterexample.
settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")
