"""Where the wheel has the native programs and libraries."""

from pathlib import Path

from ._errors import Unavailable

_FOLDER = Path(__file__).parent / "native"


def _find(name: str, what: str) -> str:
    path = _FOLDER / name
    if path.exists():
        return str(path)
    fix = "install a wheel that tools/wheel has built"
    text = f"cannot find {what}: {path} does not exist; {fix}"
    raise Unavailable(text, f"find {what}", f"{path} does not exist", fix)


def command() -> str:
    """The path of the `warpwire` command."""
    return _find("bin/warpwire", "the warpwire command")


def gdrapi() -> str:
    """The path of libgdrapi.so.2, GDRCopy's library without its kernel module."""
    return _find("lib/libgdrapi.so.2", "libgdrapi.so.2")


def ibverbs() -> str:
    """The path of libibverbs.so.1. Put its folder into LD_LIBRARY_PATH: librdmacm.so.1 is there
    too."""
    return _find("ibverbs/libibverbs.so.1", "libibverbs.so.1")


def rdmacm() -> str:
    """The path of librdmacm.so.1."""
    return _find("ibverbs/librdmacm.so.1", "librdmacm.so.1")


def ibpaths() -> str:
    """The path of the LD_PRELOAD library for programs that look for /dev/infiniband."""
    return _find("ibverbs/libwarpwire_ibpaths.so", "libwarpwire_ibpaths.so")


def nccl_plugin() -> str:
    """The path of NCCL's network plugin, for NCCL_NET_PLUGIN."""
    return _find("lib/libnccl-net-warpwire.so", "libnccl-net-warpwire.so")
