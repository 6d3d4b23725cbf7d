"""A link with a rate and a round trip, between two private network namespaces: what benchmarks call "shaped".

Each end has a TUN device with an address of its own; the kernel's token bucket (tc tbf) paces what leaves it, and a small process
carries packets across after half the round trip. Real TCP over a real queue; packets are 9000 bytes, so that carrying them costs
little. Needs Linux, root (or a user namespace), iproute2 and /dev/net/tun; `available` says whether they are there. It changes
nothing outside its own namespaces and leaves nothing behind.

    python -m scripts.link RATE_GBIT_S RTT_MS      (used by bench_transfer; prints the two namespaces and runs until its stdin ends)
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

SENDER_ADDRESS, RECEIVER_ADDRESS = "10.77.0.1", "10.77.0.2"
MTU_BYTES = 9000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000

libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def enter(namespace: str) -> None:
    """Move this thread, and all it starts from now on, into a network namespace given by its path under /proc."""
    with open(namespace) as file:
        _checked(libc.setns(file.fileno(), _CLONE_NEWNET), f"setns {namespace}")


class Link:
    """A running link: the namespaces of its two ends, until it is closed."""

    def __init__(self, rate_gbit_s: float, rtt_ms: float) -> None:
        command = [sys.executable, "-m", "scripts.link", str(rate_gbit_s), str(rtt_ms)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the link ended with status {self._process.wait()}; it needs root, iproute2 and /dev/net/tun")
        self.sender_namespace, self.receiver_namespace = json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def available() -> bool:
    """Whether a link can be made here; what is missing goes to stderr."""
    try:
        Link(1.0, 1.0).close()
    except OSError as e:
        print(f"no shaped link: {e}", file=sys.stderr)
        return False
    return True


def _make_end(address: str, peer: str, rate_gbit_s: float, rtt_ms: float) -> tuple[int, int]:
    """A new namespace with a shaped TUN device. Returns the device's and the namespace's file descriptors; we are left inside."""
    _checked(libc.unshare(_CLONE_NEWNET), "unshare")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"link0", _IFF_TUN | _IFF_NO_PI))
    bytes_per_s = rate_gbit_s * 1e9 / 8
    burst = int(max(bytes_per_s * 0.002, 4 * MTU_BYTES))
    queue = int(bytes_per_s * max(2 * rtt_ms, 10) / 1000) + burst
    for command in (
        "ip link set lo up",
        f"ip link set link0 mtu {MTU_BYTES} txqueuelen 5000 up",
        f"ip addr add {address}/32 peer {peer} dev link0",
        f"tc qdisc add dev link0 root tbf rate {int(bytes_per_s * 8)}bit burst {burst} limit {queue}",
    ):
        subprocess.run(command.split(), check=True, stdout=sys.stderr)
    return tun, os.open("/proc/self/ns/net", os.O_RDONLY)


def _carry(ends: tuple[int, int], delay_s: float) -> None:
    """Pass packets between the ends, each after `delay_s`, until stdin ends."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poller = select.poll()
    for fd in (*ends, 0):
        poller.register(fd, select.POLLIN | select.POLLHUP)
    while True:
        timeout_ms = None if not waiting else max(0.0, (waiting[0][0] - time.monotonic()) * 1000)
        for fd, _ in poller.poll(timeout_ms):
            if fd == 0:
                return
            try:
                while packet := os.read(fd, MTU_BYTES + 100):
                    waiting.append((time.monotonic() + delay_s, other[fd], packet))
            except BlockingIOError:
                pass
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, fd, packet = waiting.popleft()
            os.write(fd, packet)


def main() -> None:
    rate_gbit_s, rtt_ms = float(sys.argv[1]), float(sys.argv[2])
    sender, sender_ns = _make_end(SENDER_ADDRESS, RECEIVER_ADDRESS, rate_gbit_s, rtt_ms)
    receiver, receiver_ns = _make_end(RECEIVER_ADDRESS, SENDER_ADDRESS, rate_gbit_s, rtt_ms)
    print(json.dumps([f"/proc/{os.getpid()}/fd/{sender_ns}", f"/proc/{os.getpid()}/fd/{receiver_ns}"]), flush=True)
    _carry((sender, receiver), rtt_ms / 2000)


if __name__ == "__main__":
    main()
