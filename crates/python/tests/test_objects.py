"""Objects as memory, and memory as objects: what is accepted, refused, and kept alive."""

import array
import ctypes
import gc
import mmap
import sys
import weakref

import numpy
import pytest
import warpwire
from conftest import PATIENCE


@pytest.fixture
def alice(agents):
    return agents("alice")


def test_objects_of_all_kinds(alice):
    mapped = mmap.mmap(-1, 8192)
    plain = numpy.zeros(100, "f4")
    good = {
        "bytearray": (bytearray(64), 64),
        "array": (array.array("d", [0] * 8), 64),
        "mmap": (mapped, 8192),
        "memoryview": (memoryview(bytearray(64))[16:32], 16),
        "numpy": (plain, 400),
        "numpy, 2-D": (numpy.zeros((3, 5), "i2"), 30),
        "numpy, column-major": (numpy.zeros((3, 5), "i2", order="F"), 30),
        "numpy, rows": (numpy.zeros((8, 5), "i2")[2:4], 20),
        "numpy, a type that DLPack lacks": (numpy.zeros(4, "i4,f4"), 32),
        "ctypes": ((ctypes.c_uint32 * 8)(), 32),
        "host buffer": (warpwire.alloc(100), 100),
        "simulated GPU": (warpwire.alloc(100, "sim:0"), 100),
        "address": ((plain.ctypes.data, 400), 400),
        "address, with its device": ((plain.ctypes.data + 4, 8, "host"), 8),
    }
    for name, (object, length) in good.items():
        memory = alice.register(object)
        assert len(memory) == memory.nbytes == length, name
        assert memory.path and isinstance(memory.why, list)
        is_address = isinstance(object, tuple)
        assert memory.object is (None if is_address else object), name
        memory.deregister()
    assert alice.register(plain).address == plain.ctypes.data
    several = alice.register([plain, bytearray(8)])
    assert [len(one) for one in several] == [400, 8]


class Claims:
    """An object that says what it likes about itself."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def cuda(**changes):
    fields = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, **changes}
    return Claims(__cuda_array_interface__=fields)


class OnDevice:
    def __init__(self, device, capsule=None):
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return self.capsule


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


def closed():
    mapped = mmap.mmap(-1, 4096)
    mapped.close()
    return mapped


def test_objects_that_are_refused(alice):
    simulated = warpwire.alloc(64, "sim:0")
    wrong = [
        (numpy.zeros(8)[::2], "not contiguous"),
        (numpy.zeros((4, 4))[:, 1], "not contiguous"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (numpy.zeros(8)[::-1], "not contiguous"),
        (numpy.zeros(0), "empty"),
        (bytearray(), "empty"),
        ((4096, 0), "empty"),
        (b"read-only", "read-only"),
        (numpy.frombuffer(b"read-only", "u1"), "read-only"),
        (released(), "released"),
        (closed(), "closed"),
        (numpy.zeros(4, "M8[s]"), "DLPack only supports"),
        ((4096, 16, "cuda:0"), "memory of cuda:0"),
        ((simulated.address, 64, "host"), "memory of the host"),
        ((2**64 - 8, 64), "address"),
        ((64, 64), "nothing is mapped"),
        (cuda(), "memory of a CUDA device"),
        (cuda(strides=(8,)), "not contiguous"),
        (cuda(shape=(0,)), "empty"),
        (cuda(data=None), "no valid data"),
        (cuda(shape=(-1,)), "negative"),
        (cuda(typestr="?"), "no valid typestr"),
        (cuda(mask=5), "mask"),
        (cuda(shape=(2**62, 2**62)), "address space"),
        (Claims(__cuda_array_interface__=5), "no valid dictionary"),
        (OnDevice((10, 0)), "type 10"),
        (OnDevice((1, 0), 5), "no capsule"),
        (OnDevice((2, 0), numpy.zeros(4).__dlpack__()), "memory of cuda:0"),
    ]
    for object, why in wrong:
        with pytest.raises(warpwire.Error, match=why) as caught:
            alice.register(object)
        assert isinstance(caught.value, ValueError) and caught.value.what, object
    for object in [5, None, "text", Claims(), (1, 2, 3), ("a", "b"), (1,), {}]:
        with pytest.raises(TypeError):
            alice.register(object)
    used = numpy.zeros(4).__dlpack__()
    numpy.from_dlpack(OnDevice((1, 0), used))
    with pytest.raises(warpwire.InvalidArgument, match="no tensor"):
        alice.register(OnDevice((1, 0), used))


def test_readonly_memory_is_read_and_not_written(agents, alice):
    bob = agents("bob")
    constant = bob.register(b"constant", readonly=True)
    peer = alice.add_peer(bob.metadata)
    target = bytearray(8)
    memory = alice.register(target)
    alice.read(peer, memory, peer.memory[0]).wait(PATIENCE)
    assert target == b"constant"
    with pytest.raises(warpwire.Error) as caught:
        alice.write(peer, memory, peer.memory[0]).wait(PATIENCE)
    assert caught.value.kind != "Timeout"
    assert constant.object == b"constant"
    mine = alice.register(b"constant", readonly=True)
    there = bob.register(bytearray(8))
    peer = alice.add_peer(bob.metadata)
    with pytest.raises(warpwire.Error):
        alice.read(peer, mine, (there.address, 8)).wait(PATIENCE)
    assert mine.object == b"constant"


class Array(numpy.ndarray):
    """An array with weak references."""


def test_registrations_keep_their_objects(agents, alice):
    bob = agents("bob")
    source, target = numpy.full(1 << 16, 5, "u1").view(Array), bytearray(1 << 16)
    alive = weakref.ref(source)
    memory, there = alice.register(source), bob.register(target)
    with pytest.raises(BufferError):
        target.append(1)
    peer = alice.add_peer(bob.metadata)
    prepared = alice.prepare(peer, memory, peer.memory[0])
    del source
    gc.collect()
    assert alive() is not None, "the registration keeps it"
    with pytest.raises(warpwire.Busy, match="prepared list"):
        memory.deregister()
    del memory
    gc.collect()
    assert len(alice.metadata) > 0 and alive() is not None, "the prepared list keeps it"
    transfer = alice.write(prepared)
    del prepared
    transfer.wait(PATIENCE)
    assert target == bytes([5]) * (1 << 16)
    for _ in range(100):
        # The library's thread may be the last to hold it, for a moment.
        alice.wait_notification(0.05)
        gc.collect()
        if alive() is None:
            break
    assert alive() is None, "nothing keeps it"
    there.deregister()
    target.append(1)
    with pytest.raises(warpwire.Freed):
        there.deregister()
    with pytest.raises(warpwire.Freed):
        bob.metadata_of([there])


def test_registrations_end_with_their_block(alice):
    data = bytearray(8)
    empty = len(alice.metadata)
    with alice.register(data) as memory:
        assert len(alice.metadata) > empty
        assert len(alice.metadata_of([memory])) > empty
    assert len(alice.metadata) == empty
    data.append(1)
    alice.register(data)
    assert len(alice.metadata) == empty, "nobody holds the registration"


def test_host_buffers_are_arrays():
    buffer = warpwire.alloc(4096)
    assert (len(buffer), buffer.nbytes, buffer.device) == (4096, 4096, "host")
    view = numpy.from_dlpack(buffer)
    view[:] = 7
    assert bytes(buffer) == b"\7" * 4096 and buffer.read(2, 4094) == b"\7\7"
    assert view.ctypes.data == buffer.address == numpy.frombuffer(buffer, "u4").ctypes.data
    buffer.write(b"new", 4093)
    assert view[-3:].tobytes() == b"new"
    assert buffer.__dlpack_device__() == (1, 0)
    assert not hasattr(buffer, "__cuda_array_interface__")
    for version in (None, (0, 8), (1, 0), (1, 1), (2, 0)):
        capsule = buffer.__dlpack__(max_version=version)
        name = "dltensor_versioned" if version and version >= (1, 0) else "dltensor"
        assert f'"{name}"' in repr(capsule)
    address = buffer.address
    del buffer
    gc.collect()
    assert view[0] == 7 and view.ctypes.data == address, "the array keeps the memory"
    for wrong in [{"copy": True}, {"dl_device": (2, 0)}]:
        with pytest.raises(BufferError):
            warpwire.alloc(8).__dlpack__(**wrong)
    for call in (lambda b: b.write(b"12345", 4), lambda b: b.read(9), lambda b: b.read(1, 2**64 - 1)):
        with pytest.raises(warpwire.OutOfRange):
            call(warpwire.alloc(8))


def test_capsules_that_nobody_takes_free_their_memory():
    buffer = warpwire.alloc(64)
    before = sys.getrefcount(buffer)
    for version in (None, (1, 0)):
        capsules = [buffer.__dlpack__(max_version=version) for _ in range(5)]
        assert sys.getrefcount(buffer) == before + 5
        taken = numpy.from_dlpack(OnDevice((1, 0), capsules.pop()))
        capsules.clear()
        assert sys.getrefcount(buffer) == before + 1
        del taken
        assert sys.getrefcount(buffer) == before


def test_windows_onto_a_simulated_gpu(alice):
    gpu = warpwire.alloc(1 << 16, "sim:0")
    assert gpu.device == "sim:0" and gpu.read(4) is not None
    with pytest.raises(BufferError, match="window"):
        memoryview(gpu)
    with pytest.raises(BufferError, match="window"):
        numpy.from_dlpack(gpu)
    memory = alice.register(gpu)
    for window in (gpu.window(), memory.window(), warpwire.window(gpu),
                   warpwire.window((gpu.address, gpu.nbytes, "sim:0"))):
        with window:
            assert (len(window), window.address, window.path) == (1 << 16, gpu.address, "memfd")
            assert window.why == []
            view = window.view
            assert not view.readonly and view.nbytes == 1 << 16
            view[5:10] = b"hello"
            assert gpu.read(5, 5) == b"hello"
            words = numpy.frombuffer(window, "u4")
            words[-1] = 0xABCDEF01
            window.write(b"wide" * 1000, 100)
            window.flush()
            assert window.read(8, 100) == gpu.read(8, 100) == b"widewide"
            assert gpu.read(4, (1 << 16) - 4) == b"\x01\xef\xcd\xab"
            with pytest.raises(BufferError, match="views"):
                window.close()
            for call in (lambda: window.write(b"x", 1 << 16), lambda: window.read(1, 1 << 16)):
                with pytest.raises(warpwire.OutOfRange):
                    call()
            view.release()
            del words
        with pytest.raises(warpwire.Freed):
            window.flush()
        with pytest.raises(BufferError):
            memoryview(window)
    kept = gpu.window().view
    del gpu, memory
    gc.collect()
    kept[0:1] = b"!"
    assert kept[0:1] == b"!", "the view keeps the memory"


def test_windows_onto_host_memory_are_refused(alice):
    for object in (bytearray(8), warpwire.alloc(8), numpy.zeros(8)):
        with pytest.raises(warpwire.InvalidArgument, match="host memory"):
            warpwire.window(object)
    with pytest.raises(warpwire.InvalidArgument, match="host memory"):
        alice.register(bytearray(8)).window()


def test_memory_that_cannot_be_allocated():
    for size, device, error in [
        (0, "host", ValueError),
        (2**63, "host", ValueError),
        (64, "toaster", ValueError),
        (64, "sim:99", warpwire.Error),
        (0, "sim:0", ValueError),
        (2**50, "sim:0", MemoryError),
    ]:
        with pytest.raises(error):
            warpwire.alloc(size, device)


def test_torch_tensors(agents, alice):
    torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
    bob = agents("bob")
    source, target = torch.arange(1000, dtype=torch.float32), torch.zeros(1000)
    memory, _there = alice.register(source), bob.register(target)
    peer = alice.add_peer(bob.metadata)
    alice.write(peer, memory, peer.memory[0]).wait(PATIENCE)
    assert torch.equal(source, target)
    view = torch.from_dlpack(warpwire.alloc(64))
    view[:] = 3
    for wrong in (source.reshape(10, 100).T[::2], torch.zeros(4, requires_grad=True)):
        with pytest.raises(warpwire.InvalidArgument):
            alice.register(wrong)
