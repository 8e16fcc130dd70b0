"""Exceptions: one class per kind of error, each also the built-in one that programs know."""

from __future__ import annotations


class Error(Exception):
    """A failure: what was attempted, why it failed, and what to do.

    Its text is one line with all three.
    """

    #: The cause, for programs: "InvalidArgument", "Timeout", "PeerLost", …
    kind: str = "Error"
    #: What was attempted, and on which object.
    what: str
    #: The reason.
    why: str
    #: What to do about it, if there is an advice.
    fix: str | None
    #: The errno or CUresult of a call that failed.
    code: int | None

    def __init__(
        self,
        text: str,
        what: str = "",
        why: str = "",
        fix: str | None = None,
        code: int | None = None,
    ) -> None:
        super().__init__(text)
        self.what, self.why, self.fix, self.code = what, why, fix, code

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.what, self.why, self.fix, self.code))


class InvalidArgument(Error, ValueError):
    """A parameter is invalid regardless of the state."""

    kind = "InvalidArgument"


class OutOfRange(Error, IndexError):
    """A range exceeds the object that it refers to."""

    kind = "OutOfRange"


class Misaligned(Error, ValueError):
    """An address or offset is not aligned as the operation requires."""

    kind = "Misaligned"


class OutOfMemory(Error, MemoryError):
    """The device or the host has not enough memory."""

    kind = "OutOfMemory"


class NotDeviceMemory(Error, ValueError):
    """The address is not memory that a device or this process has."""

    kind = "NotDeviceMemory"


class Freed(Error):
    """The object has been freed, closed or revoked."""

    kind = "Freed"


class Busy(Error):
    """The object is in use; the same call may succeed later."""

    kind = "Busy"


class Unavailable(Error):
    """A library, device node or file is missing on this machine."""

    kind = "Unavailable"


class Unsupported(Error, NotImplementedError):
    """This device, driver or platform does not support it."""

    kind = "Unsupported"


class Timeout(Error, TimeoutError):
    """The timeout expired."""

    kind = "Timeout"


class Cancelled(Error):
    """It was cancelled before it was complete."""

    kind = "Cancelled"


class StreamFailed(Error):
    """Work queued earlier on the stream failed."""

    kind = "StreamFailed"


class DeviceLost(Error):
    """The whole device context is lost."""

    kind = "DeviceLost"


class Stale(Error):
    """It refers to an object of a peer that no longer exists."""

    kind = "Stale"


class PeerLost(Error, ConnectionError):
    """A peer has died, has disconnected, or does not answer."""

    kind = "PeerLost"


class PermissionDenied(Error, PermissionError):
    """The operating system denied permission."""

    kind = "PermissionDenied"


class Malformed(Error, ValueError):
    """Input (metadata, a variable, a file) has the wrong format."""

    kind = "Malformed"


class SystemCallFailed(Error, OSError):
    """A system call failed; its errno is in `code`."""

    kind = "Os"


class CudaFailed(Error):
    """A call of the CUDA driver failed; its CUresult is in `code`."""

    kind = "Cuda"


_CLASSES: dict[str, type[Error]] = {
    one.kind: one for one in Error.__subclasses__()
}


def make(
    kind: str, code: int | None, text: str, what: str, why: str, fix: str | None
) -> Error:
    """The exception for an error of the library."""
    error = _CLASSES.get(kind, Error)(text, what, why, fix, code)
    error.kind = kind
    if isinstance(error, SystemCallFailed):
        error.errno, error.strerror = code, why
    return error
