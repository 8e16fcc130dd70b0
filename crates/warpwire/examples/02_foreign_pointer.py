"""Hands a PyTorch tensor's memory to Warpwire, which writes a pattern into it; checks the pattern.

python3 02_foreign_pointer.py lib02_foreign_pointer.so
"""
import ctypes
import os
import sys

if len(sys.argv) == 3:  # which allocator PyTorch uses must be known before it is imported
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[2]
import numpy
import torch

library = ctypes.CDLL(os.path.abspath(sys.argv[1]))
stamp = library.warpwire_stamp
stamp.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]


def pattern(seed, count):
    with numpy.errstate(over="ignore"):
        u64 = numpy.uint64
        z = u64(seed) + numpy.arange(1, count + 1, dtype=u64) * u64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
        return z ^ (z >> u64(31))


count, skip = 100_000, 12_345
tensor = torch.zeros(count + 2 * skip, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
inner = tensor[skip : skip + count]
assert stamp(0, inner.data_ptr(), count * 8, 7) == 0
found = tensor.cpu().numpy().view(numpy.uint64)
assert (found[skip : skip + count] == pattern(7, count)).all(), "the pattern is not there"
assert not found[:skip].any() and not found[skip + count :].any(), "the neighbours were touched"

host = torch.zeros(count, dtype=torch.int64)
assert stamp(0, host.data_ptr(), count * 8, 7) == -1, "host memory must be refused"
assert stamp(0, inner.data_ptr(), 1 << 45, 7) == -1, "a range past the end must be refused"
print(f"ok: torch {torch.__version__}, {torch.cuda.memory.get_allocator_backend()} allocator")
