"""Checks captures: every RoCE packet must have the right ICRC, and tshark must find none malformed.

QEMU captures the traffic between host and guest (guestN.pcap), below both stacks; Warpwire's link
captures what each case sent and received (cases/*.pcap). Packets from or to an address whose last
byte is 66 (10.77.1.66, fd77:1::42) are corrupted on purpose.
"""
import collections
import shutil
import struct
import subprocess
import sys
import zlib

ETHERNET, RAW_IP = 1, 101
ROCE_PORT = 4791
DAMAGED = 66


class Capture:
    def __init__(self, path):
        # A killed case leaves an empty file.
        data = path.read_bytes().ljust(24, b"\0")
        magic, = struct.unpack_from("<I", data)
        self.name, self.nanoseconds = path.name, magic == 0xA1B23C4D
        self.kind, = struct.unpack_from("<I", data, 20)
        self.header, self.records, at = data[:24], [], 24
        while at + 16 <= len(data):
            length, = struct.unpack_from("<I", data, at + 8)
            self.records.append(data[at : at + 16 + length])
            at += 16 + length

    def packets(self):
        """IP packets."""
        for record in self.records:
            frame = record[16:]
            if self.kind == RAW_IP:
                yield frame
            elif frame[12:14] in (b"\x08\x00", b"\x86\xdd"):
                yield frame[14:]


def roce_of(packet):
    """The packet without padding, and the offset of its UDP header; None if it is not RoCE."""
    if packet[0] >> 4 == 4:
        start, protocol, length = 20, packet[9], struct.unpack_from(">H", packet, 2)[0]
    else:
        start, protocol, length = 40, packet[6], 40 + struct.unpack_from(">H", packet, 4)[0]
    if protocol != 17 or struct.unpack_from(">H", packet, start + 2)[0] != ROCE_PORT:
        return None
    return packet[:length], start


def icrc(packet, start):
    """The ICRC of a packet: over all but the ICRC itself, with variant fields set to ones."""
    masked = bytearray(packet[:-4])
    changing = [1, 8, 10, 11] if start == 20 else [1, 2, 3, 7]
    for at in [*changing, start + 6, start + 7, start + 8 + 4]:
        masked[at] = 0xFF
    if start == 40:
        masked[0] |= 0x0F
    return zlib.crc32(bytes(masked), zlib.crc32(b"\xff" * 8))


def self_test():
    """A packet of another implementation passes, and fails if a bit of it is flipped."""
    packet = bytearray.fromhex(
        "4500003c000040004011b6adc0000201c0000202c12312b7002800000420ffff0000001180000123"
        "48656c6c6f2c20524f434576322100" "00ce211db8")
    right = lambda: icrc(packet, 20).to_bytes(4, "little") == packet[-4:]
    assert right(), "the ICRC of a known packet"
    for at in (0, 5, 13, 21, 28, 33, 40, 55, 58):
        packet[at] ^= 1
        assert not right(), f"byte {at} is not covered"
        packet[at] ^= 1


def is_damaged(packet, start):
    # The last bytes of both addresses.
    return DAMAGED in ((packet[15], packet[19]) if start == 20 else (packet[23], packet[39]))


def check_icrc(capture):
    good, corrupted, wrong = 0, 0, []
    for number, packet in enumerate(capture.packets(), 1):
        found = roce_of(packet)
        if not found:
            continue
        packet, start = found
        if is_damaged(packet, start):
            corrupted += 1
            continue
        if icrc(packet, start).to_bytes(4, "little") == packet[-4:]:
            good += 1
        else:
            wrong.append(f"{capture.name}: packet {number}: ICRC {packet[-4:].hex()}: {packet[:64].hex()}")
    return good, corrupted, wrong


def check_with_tshark(path):
    tshark = shutil.which("tshark")
    if not tshark:
        return None, []
    damaged = f"(ip.addr == 10.77.1.{DAMAGED} or ipv6.addr == fd77:1::{DAMAGED:x})"
    filters = ["-Y", f"udp.dstport == {ROCE_PORT} and not {damaged}"]
    fields = ["-T", "fields", "-e", "frame.number", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed", "-e", "frame.protocols"]
    done = subprocess.run([tshark, "-r", str(path), *filters, *fields], capture_output=True, text=True)
    if done.returncode != 0:
        return 0, [f"tshark: {done.stderr.strip()}"]
    opcodes, wrong = collections.Counter(), []
    for line in done.stdout.splitlines():
        number, opcode, malformed, protocols = (line.split("\t") + [""] * 4)[:4]
        opcodes[opcode] += 1
        # tshark guesses the protocol of a payload (it may look like NFS or VLAN); errors there are
        # ignored.
        malformed = malformed and protocols.endswith(":infiniband")
        if malformed or not opcode:
            wrong.append(f"{path.name}: packet {number} is {'malformed' if malformed else 'not RoCE'} to tshark")
    return opcodes, wrong


def join(captures, path):
    """Writes all captures into one file: tshark takes longer to start than to read."""
    with open(path, "wb") as file:
        file.write(captures[0].header)
        for capture in captures:
            file.writelines(capture.records)


def check(logs):
    """Checks the captures of a run; returns 1 if something is wrong, else 0."""
    self_test()
    paths = sorted(logs.glob("guest*.pcap"))
    ours = [Capture(path) for path in sorted((logs / "cases").glob("*.pcap"))]
    ours = [capture for capture in ours if capture.records]
    good, corrupted, wrong = 0, 0, []
    for capture in [*map(Capture, paths), *ours]:
        more, damaged, bad = check_icrc(capture)
        good, corrupted, wrong = good + more, corrupted + damaged, wrong + bad
    if ours:
        join(ours, logs / "ours.pcap")
        paths.append(logs / "ours.pcap")
    print(f"wire: {good} packets with the right ICRC, {len(wrong)} with a wrong one; {corrupted} corrupted on purpose")
    for path in paths:
        opcodes, bad = check_with_tshark(path)
        wrong += bad
        if opcodes is None:
            print("skipped: tshark (not installed; on Debian: apt-get install tshark)")
        else:
            print(f"wire: tshark dissects {sum(opcodes.values())} packets of {len(opcodes)} opcodes in {path.name}, {len(bad)} wrong")
    if not good + corrupted:
        wrong.append("no RoCE packet was captured")
    for text in wrong[:20]:
        print(f"failed: {text}", file=sys.stderr)
    return 1 if wrong else 0
