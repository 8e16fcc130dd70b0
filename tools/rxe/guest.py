"""Running guests: QEMU, its console, and a shell in the guest over TCP, in a network namespace."""
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

from image import Archive, Missing, add_program

SHELL_PORT = 7777
# A guest is ready after 6 s on an idle machine, and after 13 s on a busy one. Seconds.
BOOT_DEADLINE = 300


def host_address(number):
    return f"10.77.{number}.1"


def guest_address(number):
    return f"10.77.{number}.2"


def namespace():
    """The command prefix that runs another command as root of its own network namespace."""
    probe = ["sh", "-c", "ip link set lo up && ip tuntap add dev tap0 mode tap"]
    ways = [["unshare", "--map-root-user", "--net"]]
    if os.getuid() == 0:
        ways.insert(0, ["unshare", "--net"])
    for way in ways:
        done = subprocess.run(way + probe, capture_output=True, text=True)
        if done.returncode == 0:
            return way
    why = " ".join(done.stderr.split()) or f"status {done.returncode}"
    raise Missing(f"no network namespace with a tap in it: {why}")


def enter_network(guests, mtu):
    """Configures the namespace: a tap for each guest."""
    commands = ["ip link set lo up"]
    for number in range(1, guests + 1):
        tap = f"tap{number}"
        commands += [
            f"ip tuntap add dev {tap} mode tap",
            f"ip link set {tap} mtu {mtu}",
            f"ip addr add {host_address(number)}/24 dev {tap}",
            f"ip addr add fd77:{number}::1/64 dev {tap} nodad",
            # Packets from these addresses are corrupted on purpose: see wire.py.
            f"ip addr add 10.77.{number}.66/24 dev {tap}",
            f"ip addr add fd77:{number}::42/64 dev {tap} nodad",
            f"ip link set {tap} up",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True)


class Guest:
    """A guest. It boots on construction and runs until `stop`."""

    def __init__(self, number, image, logs, mtu=4300, together=False, files=()):
        self.number, self.logs = number, logs
        self.log, self.pcap = logs / f"guest{number}.log", logs / f"guest{number}.pcap"
        self.started, self.ready = time.monotonic(), threading.Event()
        kernel, initrd = image
        append = f"console=ttyS0 quiet panic=-1 mitigations=off lab.number={number} lab.mtu={mtu}"
        command = [
            # QEMU is killed when this process ends.
            "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
            # Emulation, because guests hang under nested KVM. One CPU: with two, rxe can miss that
            # its packets have left, and then waits for ever (docs/interop.md).
            "-accel", "tcg", "-cpu", "max", "-m", "1024", "-smp", "1",
            "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-serial", "stdio", "-no-reboot",
            "-kernel", str(kernel), "-initrd", str(with_files(initrd, files, logs / f"guest{number}.initramfs")),
            "-append", append, *self.nics(mtu, together),
            "-object", f"filter-dump,id=dump,netdev=host,file={self.pcap}",
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=self.read_console, daemon=True)
        self.reader.start()

    def nics(self, mtu, together):
        """No virtio header on the tap: frames are segmented and have checksums."""
        number = self.number
        device = f"virtio-net-pci,romfile=,host_mtu={mtu}"
        tap = f"tap,id=host,ifname=tap{number},script=no,downscript=no,vnet_hdr=off"
        nics = ["-netdev", tap, "-device", f"{device},netdev=host,mac=52:54:00:77:00:0{number}"]
        if together:
            own, other = (f"type=inet,host=127.0.0.1,port=4780{n}" for n in (number, 3 - number))
            own, other = (re.sub(r"(\w+)=", rf"{side}.\1=", text) for side, text in (("local", own), ("remote", other)))
            nics += ["-netdev", f"dgram,id=other,{own},{other}",
                     "-device", f"{device},netdev=other,mac=52:54:00:78:00:0{number}"]
        return nics

    def read_console(self):
        """Copies the console to the log, with the time since the start."""
        with open(self.log, "w") as log:
            for line in self.process.stdout:
                text = line.decode(errors="replace").rstrip()
                log.write(f"{time.monotonic() - self.started:8.2f} {text}\n")
                log.flush()
                if text.startswith("lab: ready"):
                    self.ready.set()

    def wait_ready(self, deadline=BOOT_DEADLINE):
        while not self.ready.wait(0.1):
            late = time.monotonic() - self.started > deadline
            if late or self.process.poll() is not None:
                what = f"was not ready in {deadline} s" if late else f"ended with status {self.process.returncode}"
                raise RuntimeError(f"guest {self.number} {what}; its console:\n{self.console_tail()}")
        self.connect().close()

    def connect(self):
        """Opens a shell in the guest, which may start to listen shortly after it is ready."""
        end = time.monotonic() + 10
        while True:
            try:
                return socket.create_connection((guest_address(self.number), SHELL_PORT), timeout=5)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def console_tail(self):
        return "\n".join(self.log.read_text().splitlines()[-20:]) if self.log.exists() else "(none)"

    def run(self, command, deadline, out=None):
        """Runs a shell command in the guest; returns its status. Copies its output to `out`."""
        end = time.monotonic() + deadline
        with self.connect() as shell:
            shell.sendall(f"(\n{command}\n) 2>&1 </dev/null; echo \"lab-status=$?\"; exit\n".encode())
            text = b""
            while not (done := re.search(rb"lab-status=(\d+)\n", text)):
                shell.settimeout(max(0.01, end - time.monotonic()))
                try:
                    more = shell.recv(65536)
                except TimeoutError:
                    raise RuntimeError(f"guest {self.number} did not finish within {deadline} s: {command}") from None
                if not more:
                    raise RuntimeError(f"guest {self.number} closed the connection: {command}\n{self.console_tail()}")
                text += more
                if out:
                    out.write(re.sub(r"lab-status=\d+\n", "", more.decode(errors="replace")))
                    out.flush()
        return int(done[1])

    def stop(self):
        """Stops the guest and its capture."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(5)
        (self.logs / f"guest{self.number}.initramfs").unlink(missing_ok=True)


def with_files(initrd, files, place):
    """The initramfs with these files in /job, and their libraries: the kernel unpacks concatenated
    archives."""
    archive = Archive()
    for file in map(pathlib.Path, files):
        add_program(archive, f"job/{file.name}", str(file))
    base = initrd.read_bytes()
    place.write_bytes(base + b"\0" * (-len(base) % 4) + archive.bytes())
    return place


def compile_peer(folder):
    """Compiles the program that executes verbs in the guest for the tests."""
    source, program = pathlib.Path(__file__).resolve().parent / "verbs-peer.c", folder / "verbs-peer"
    command = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", str(source), "-libverbs", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stderr}")
    return program


def have(tool):
    return shutil.which(tool) is not None
