"""What both Python programs of this folder have in common, and what is not counted: the two sides,
a connection between them for metadata, the data, and the end after an error.

    PROGRAM target PORT             listens there
    PROGRAM initiator PORT HOST     connects, and tries again while nothing listens
"""

import os
import sys
import time
from multiprocessing.connection import Client, Listener

import numpy

LEN = 1 << 20
TIMEOUT = 20  # seconds, for the whole program
END = time.monotonic() + TIMEOUT


def check_time(what):
    """For loops that wait: fails when the time is over."""
    if time.monotonic() > END:
        raise TimeoutError(f"cannot {what}: timed out")


def pattern():
    at = numpy.arange(LEN)
    return (at * 7 + (at >> 8) * 13 + 1).astype("u1")


def verify(memory):
    if not (memory == pattern()).all():
        raise ValueError("cannot verify the data: a byte is wrong")
    print(f"verified {LEN} bytes", flush=True)


def connect(port, host):
    while True:
        try:
            return Client((host, port))
        except ConnectionRefusedError:
            check_time("connect to the target")
            time.sleep(0.01)


def run(target, initiator):
    status = 0
    try:
        match sys.argv[1:]:
            case ["target", port]:
                with Listener(("", int(port))) as listener, listener.accept() as channel:
                    target(channel)
            case ["initiator", port, host]:
                with connect(int(port), host) as channel:
                    initiator(channel)
            case _:
                raise ValueError("the arguments are: target PORT, or: initiator PORT HOST")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 1
    if "nixl_cu12" in sys.modules:
        os._exit(status)  # an exit handler of NIXL 1.5.1 crashes once its backend UCX was opened
    sys.exit(status)
