"""Registers PyTorch tensors in every way and accesses them by RDMA; then frees registered ones.

python3 06_register.py lib06_register.so [PYTORCH_CUDA_ALLOC_CONF]
"""
import ctypes
import os
import sys

if len(sys.argv) > 2:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[2]
import torch

library = ctypes.CDLL(sys.argv[1])
library.warpwire_register.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
library.warpwire_register.restype = ctypes.c_int64
library.warpwire_check.argtypes = [ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint8]
library.warpwire_check.restype = ctypes.c_int64

print("allocator:", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "native"), flush=True)
failed = 0
for size in (5000, 3 << 20, 50 << 20):
    for how, name in enumerate(["address", "dma-buf, pinned", "dma-buf, may move", "staged"]):
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        print(f"{size} bytes, registered by {name}", flush=True)
        number = library.warpwire_register(tensor.data_ptr() + 3, size - 3, how)
        if number < 0:
            continue
        length = min(size - 1000, 1 << 20)
        done = library.warpwire_check(number, 501, length, 77)
        torch.cuda.synchronize()
        part = tensor[504:504 + length]
        good = done == 0 and bool((part == 77).all()) and int(tensor[:504].max()) == 0
        good = good and int(tensor[504 + length:].max()) == 0
        print("  verified by PyTorch" if good else f"  WRONG ({done})", flush=True)
        failed += not good

print("tensors freed while registered", flush=True)
for how in (0, 2):
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    number = library.warpwire_register(tensor.data_ptr(), 64 << 20, how)
    if number < 0:
        continue
    failed += library.warpwire_check(number, 0, 4096, 1) != 0
    del tensor
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    gone = library.warpwire_check(number, 0, 4096, 2)
    print("  failed, as expected" if gone == 2 else f"  NO ERROR ({gone})", flush=True)
    failed += gone != 2
sys.exit(1 if failed else 0)
