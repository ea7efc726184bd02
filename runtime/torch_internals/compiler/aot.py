"""Private names of AOT autograd, which traces a joint graph of forward and backward and partitions it.

Imported only where a module is compiled: the import takes a second.
"""

from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = ["aot_function", "min_cut_rematerialization_partition"]
