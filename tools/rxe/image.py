"""The guest's image: a Debian kernel, and an initramfs with rdma-core, kept in .cache/rxe."""
import fcntl
import gzip
import hashlib
import lzma
import os
import pathlib
import platform
import re
import shutil
import struct
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache" / "rxe"

# Required files, and the Debian packages that contain them.
PACKAGES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/usr/bin/busybox": "busybox-static",
    "/usr/bin/ibv_rc_pingpong": "ibverbs-utils",
    "/usr/bin/ib_write_bw": "perftest",
    "/usr/bin/rdma": "iproute2",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/usr/bin/gcc": "gcc",
    "/usr/bin/unshare": "util-linux",
}
PROGRAMS = [
    "ip", "rdma", "ibv_devinfo", "ibv_devices", "ibv_rc_pingpong", "ibv_srq_pingpong", "ibv_uc_pingpong",
    "ibv_ud_pingpong", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat", "ib_send_bw", "ib_send_lat",
    "ib_atomic_bw", "ib_atomic_lat",
]
# rxe requests crc32 from the crypto API by name, so it is in no dependency list; newer kernels have
# it built in.
MODULES = ["crc32_generic", "crc32_pclmul", "virtio_pci", "virtio_net", "veth", "ib_uverbs", "rdma_ucm", "rdma_rxe"]
MUST_HAVE = "rdma_rxe"


class Missing(Exception):
    """The reason why no guest can run here."""


def prepare(say, package=None):
    """Builds kernel and initramfs, unless they are current; returns their paths."""
    if platform.machine() != "x86_64":
        raise Missing(f"the guest is for x86-64, and this is {platform.machine()}")
    install(say)
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = os.open(CACHE, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        package = package or kernel_package()
        place = CACHE / package
        kernel, initrd, stamp = place / "kernel", place / "initramfs.gz", place / "stamp"
        wanted = fingerprint(package)
        if not stamp.exists() or stamp.read_text() != wanted:
            say(f"building the guest from {package}")
            build(package, kernel, initrd)
            stamp.write_text(wanted)
    except OSError as why:
        raise Missing(f"cannot build the image: {why}") from why
    finally:
        os.close(lock)
    return kernel, initrd


def missing():
    names = {pathlib.PurePath(file).name for file in PACKAGES}
    # /usr/bin and /bin are one folder on some systems, and separate on others.
    there = {name for name in names if shutil.which(name)}
    return sorted({p for file, p in PACKAGES.items() if not os.path.exists(file) and pathlib.PurePath(file).name not in there})


def install(say):
    packages = missing()
    if not packages:
        return
    todo = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise Missing(f"not installed: {' '.join(packages)}; as root on Debian: {todo}")
    say(todo)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], [*todo.split(), "-y", "-qq"]):
        done = subprocess.run(step, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if missing():
        raise Missing(f"{todo}: {' '.join(done.stderr.split())[-300:]}")


def kernel_package():
    """The package of the newest kernel; a previously used one if apt knows none."""
    command = ["apt-cache", "depends", "linux-image-amd64"]
    done = subprocess.run(command, capture_output=True, text=True) if shutil.which("apt-cache") else None
    found = re.search(r"Depends: (linux-image-\S+)", done.stdout) if done else None
    if found:
        return found[1]
    for stamp in CACHE.glob("*/stamp"):
        return stamp.parent.name
    raise Missing("apt knows no linux-image-amd64; run apt-get update as root")


def fingerprint(package):
    """Identifies the image's inputs: it is rebuilt when they change."""
    whole = hashlib.sha256()
    for file in [HERE / "init", HERE / "image.py"]:
        whole.update(file.read_bytes())
    for program in PROGRAMS:
        path = shutil.which(program)
        if not path:
            raise Missing(f"no {program}")
        whole.update(f"{path} {os.stat(path).st_size}".encode())
    return f"{package} {whole.hexdigest()}\n"


def build(package, kernel, initrd):
    work = kernel.parent / "work"
    shutil.rmtree(kernel.parent, ignore_errors=True)
    work.mkdir(parents=True)
    for name in [package, *more_of_the_kernel(package)]:
        run(["apt-get", "download", "-qq", name], work)
    for deb in work.glob("*.deb"):
        run(["dpkg", "-x", str(deb), "unpacked"], work)
    unpacked = work / "unpacked"
    images = [*unpacked.glob("boot/vmlinuz-*"), *unpacked.glob("usr/lib/modules/*/vmlinuz")]
    if not images:
        raise Missing(f"{package} contains no kernel")
    kernel.write_bytes(unpack_kernel(images[0].read_bytes()))
    modules = {}
    for file in [*unpacked.rglob("*.ko"), *unpacked.rglob("*.ko.xz")]:
        modules[file.name.split(".ko")[0].replace("-", "_")] = file
    with gzip.open(initrd, "wb", compresslevel=3) as file:
        file.write(initramfs(modules))
    shutil.rmtree(work)


def more_of_the_kernel(package):
    """Further packages of the kernel: from Linux 6.19 on, Debian splits it."""
    done = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True)
    return re.findall(r"Depends: (linux-(?:binary|modules|base)-\d\S+)", done.stdout)


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"{' '.join(command)}: {' '.join(done.stderr.split())[-300:]}")


def unpack_kernel(image):
    """The ELF file inside a compressed kernel: QEMU boots it in half the time."""
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ"):
        kernel = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd") and shutil.which("zstd"):
        kernel = subprocess.run(["zstd", "-dcq"], input=payload[:-4], stdout=subprocess.PIPE).stdout
    else:
        return image
    return kernel if kernel.startswith(b"\x7fELF") else image


class Archive:
    """Builds an initramfs: a cpio archive in "newc" format, without privileges or tools."""

    def __init__(self):
        self.parts = []
        self.names = set()
        self.length = 0

    def add(self, name, mode, data=b""):
        if name in self.names:
            return
        self.names.add(name)
        encoded = name.encode() + b"\0"
        fields = [len(self.names), mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        for part in (head, data):
            self.parts += [part, b"\0" * (-len(part) % 4)]

    def folder(self, name):
        above = os.path.dirname(name)
        if above:
            self.folder(above)
        self.add(name, 0o40755)

    def link(self, name, target):
        self.add(name, 0o120777, target.encode())

    def file(self, name, data, mode=0o100755):
        self.folder(os.path.dirname(name) or "tmp")
        self.add(name, mode, data)

    def bytes(self):
        self.add("TRAILER!!!", 0)
        return b"".join(self.parts)


def initramfs(modules):
    archive = Archive()
    for name in ("usr/bin", "usr/lib", "usr/lib64", "proc", "sys", "dev", "tmp", "run", "job", "etc", "lab"):
        archive.folder(name)
    for name, target in (("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("usr/sbin", "bin")):
        archive.link(name, target)
    # Before busybox's applets, so that they do not replace real programs such as `ip`.
    for program in PROGRAMS:
        add_program(archive, f"usr/bin/{program}", shutil.which(program))
    archive.file("usr/bin/busybox", pathlib.Path(shutil.which("busybox")).read_bytes())
    for applet in subprocess.run(["busybox", "--list"], capture_output=True, text=True).stdout.split():
        archive.link(f"usr/bin/{applet}", "busybox")
    add_provider(archive)
    order = []
    for module in MODULES:
        add_module(archive, module, modules, order)
    if MUST_HAVE not in [name.split(".")[0] for name in order]:
        raise Missing(f"the kernel has no {MUST_HAVE}; Debian's cloud kernels omit it")
    archive.file("etc/modules", "".join(name + "\n" for name in order).encode(), 0o100644)
    archive.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o100644)
    archive.file("etc/hosts", b"127.0.0.1 localhost\n", 0o100644)
    archive.add("init", 0o100755, (HERE / "init").read_bytes())
    return archive.bytes()


def add_program(archive, name, path):
    """Adds a program or library, and the libraries that it links to."""
    archive.file(name, pathlib.Path(path).read_bytes())
    listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        # The guest's /lib is /usr/lib.
        place = library.lstrip("/")
        place = place if place.startswith("usr/") else f"usr/{place}"
        archive.file(place, pathlib.Path(library).read_bytes())


def add_provider(archive):
    """Adds rxe's libibverbs provider and its .driver file, and libgcc_s, which exiting threads
    load."""
    folders = {library.parent for library in pathlib.Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")}
    for folder in folders:
        for provider in folder.glob("librxe-rdmav*.so"):
            add_program(archive, str(provider).lstrip("/"), str(provider))
        for library in folder.parent.glob("libgcc_s.so.1"):
            archive.file(str(library).lstrip("/"), library.read_bytes())
    archive.file("etc/libibverbs.d/rxe.driver", b"driver rxe\n", 0o100644)


def add_module(archive, name, modules, order):
    """Adds a kernel module after its dependencies; a missing one is built in or not in this
    version."""
    path = modules.get(name)
    if path is None or f"{name}.ko" in order:
        return
    data = path.read_bytes()
    data = lzma.decompress(data) if path.suffix == ".xz" else data
    needs = re.search(rb"\0depends=([^\0]*)\0", data)
    for other in needs[1].decode().split(",") if needs else []:
        add_module(archive, other.replace("-", "_"), modules, order)
    order.append(f"{name}.ko")
    archive.file(f"lib/modules/{name}.ko".replace("lib/", "usr/lib/", 1), data, 0o100644)
