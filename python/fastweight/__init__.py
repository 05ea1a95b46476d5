# SPDX-License-Identifier: Apache-2.0
"""Fastweight: linear attention whose state is a fast-weight memory that is erased, written and read.

fastweight.ops has the operators as functions on NumPy arrays and torch tensors. `python -m fastweight info` says what is
installed and what runs.

Threads: calls without a context run on the default one. Its threads are set_num_threads(n), else FW_NUM_THREADS, else
torch.get_num_threads() while torch is loaded (a later torch.set_num_threads is followed), else the cores of the process.
They sleep between calls, so that torch's threads have the cores then. Results do not depend on the number of threads.
"""
from . import _core, ops
from ._core import Context, default_context, last_impl, set_num_threads

__version__ = _core.version()
__all__ = ["Context", "__version__", "default_context", "last_impl", "ops", "set_num_threads"]
