"""GPU networking: transfer agents, messages, CPU windows onto GPU memory, and the native libraries.

    import numpy, warpwire

    agent = warpwire.Agent("alice")
    memory = agent.register(numpy.zeros(1 << 20, "u1"))   # also torch, CuPy, mmap, bytearray
    peer = agent.add_peer(metadata)                       # bytes from the other agent
    agent.write(peer, memory[0:4096], peer.memory[0][0:4096], notify=b"page 0").wait()

See docs/python.md.
"""

from ._errors import (
    Busy,
    Cancelled,
    CudaFailed,
    DeviceLost,
    Error,
    Freed,
    InvalidArgument,
    Malformed,
    Misaligned,
    NotDeviceMemory,
    OutOfMemory,
    OutOfRange,
    PeerLost,
    PermissionDenied,
    Stale,
    StreamFailed,
    SystemCallFailed,
    Timeout,
    Unavailable,
    Unsupported,
)
from ._native import command, gdrapi, ibpaths, ibverbs, nccl_plugin, rdmacm
from ._notification import Notification
from ._warpwire import (
    Agent,
    Buffer,
    ChannelMemory,
    ChannelRequest,
    Comm,
    DeviceChannel,
    Memory,
    Peer,
    Prepared,
    Range,
    RemoteMemory,
    Request,
    Stream,
    Transfer,
    Window,
    __version__,
    alloc,
    doctor,
    window,
)

__all__ = [
    "Agent",
    "Buffer",
    "Busy",
    "Cancelled",
    "ChannelMemory",
    "ChannelRequest",
    "Comm",
    "CudaFailed",
    "DeviceChannel",
    "DeviceLost",
    "Error",
    "Freed",
    "InvalidArgument",
    "Malformed",
    "Memory",
    "Misaligned",
    "NotDeviceMemory",
    "Notification",
    "OutOfMemory",
    "OutOfRange",
    "Peer",
    "PeerLost",
    "PermissionDenied",
    "Prepared",
    "Range",
    "RemoteMemory",
    "Request",
    "Stale",
    "Stream",
    "StreamFailed",
    "SystemCallFailed",
    "Timeout",
    "Transfer",
    "Unavailable",
    "Unsupported",
    "Window",
    "__version__",
    "alloc",
    "command",
    "doctor",
    "gdrapi",
    "ibpaths",
    "ibverbs",
    "nccl_plugin",
    "rdmacm",
    "window",
]
