"""Passes the memory of PyTorch tensors to Warpwire, which writes a pattern; PyTorch checks it.

python3 02_foreign_pointer.py lib02_foreign_pointer.so [PYTORCH_CUDA_ALLOC_CONF] [13_copy_lists]

With the example 13_copy_lists a second process then opens a tensor and copies to and from it.
"""
import ctypes
import os
import subprocess
import sys
import tempfile

if len(sys.argv) > 2:  # PyTorch reads its allocator settings when it is imported
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[2]
import numpy
import torch

library = ctypes.CDLL(os.path.abspath(sys.argv[1]))
by_kernel, by_cpu = library.warpwire_stamp, library.warpwire_stamp_by_cpu
for stamp in by_kernel, by_cpu:
    stamp.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]


def pattern(seed, count):
    with numpy.errstate(over="ignore"):
        u64 = numpy.uint64
        z = u64(seed) + numpy.arange(1, count + 1, dtype=u64) * u64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
        return z ^ (z >> u64(31))


count, skip = 100_000, 12_345
neighbours = [torch.ones(1000 + i, device="cuda") for i in range(20)]  # share allocator blocks
tensor = torch.zeros(count + 2 * skip, dtype=torch.int64, device="cuda")
inner = tensor[skip : skip + count]

for seed, stamp in (7, by_kernel), (8, by_cpu):
    tensor.zero_()
    torch.cuda.synchronize()
    assert stamp(0, inner.data_ptr(), count * 8, seed) == 0
    found = (tensor + 0).cpu().numpy().view(numpy.uint64)  # read by a PyTorch kernel
    assert (found[skip : skip + count] == pattern(seed, count)).all(), "the pattern is wrong"
    assert not found[:skip].any() and not found[skip + count :].any(), "bytes outside were written"

# At an unaligned offset: bytes 3.. of a small tensor.
small = torch.zeros(5000, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
assert by_cpu(0, small.data_ptr() + 3, 4000, 9) == 0
found = (small + 0).cpu().numpy()
assert (found[3:4003] == pattern(9, 500).view(numpy.uint8)).all() and not found[4003:].any()
assert all((n == 1).all() for n in neighbours), "other tensors were written"

host = torch.zeros(count, dtype=torch.int64)
for stamp in by_kernel, by_cpu:
    assert stamp(0, host.data_ptr(), count * 8, 7) == -1, "host memory must be refused"
    assert stamp(0, inner.data_ptr(), 1 << 45, 7) == -1, "a range past the end must be refused"
print(f"ok: torch {torch.__version__}, {torch.cuda.memory.get_allocator_backend()} allocator")

if len(sys.argv) > 3:
    shared = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    library.warpwire_export.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
    with tempfile.TemporaryFile("w+") as file:  # the library prints to standard output
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        done = library.warpwire_export(0, shared.data_ptr(), shared.numel())
        os.dup2(kept, 1)
        assert done == 0, "the tensor cannot be shared"
        file.seek(0)
        handle = file.read().strip()
    subprocess.run([sys.argv[3], "cuda:0", handle], check=True)
    assert (shared != 0).any(), "the second process wrote nothing"
