"""What peers send."""

from typing import NamedTuple


class Notification(NamedTuple):
    """What a peer sent: with a transfer, after its data; or on its own."""

    #: The name of the agent that sent it.
    sender: str
    #: What it sent.
    data: bytes
