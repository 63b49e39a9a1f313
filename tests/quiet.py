"""Silences, in workers, the warnings of PyTorch's and Triton's interpreter that tests provoke on purpose.

Pytest doesn't capture what workers print. Imported by the server that they are forked from.
"""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import suppress

import torch.distributed.tensor  # sets up its loggers  # noqa: F401

logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # operators with wrong arguments
warnings.filterwarnings("ignore", "ComplexHalf support", UserWarning)
warnings.filterwarnings("ignore", "An output with one or more elements was resized", UserWarning)
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter|tests\.triton_interp")
with suppress(ImportError):
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # the compiler's progress bar would leave a semaphore in each worker
