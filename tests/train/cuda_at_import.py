"""A module that asks CUDA for its devices when it is imported, as modules with kernels do."""

from __future__ import annotations

import torch

torch._C._cuda_getDeviceCount()
