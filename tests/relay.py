"""relay.py A B DELAY_MS LOST: carries frames between two interfaces, after a delay.

LOST of them, a number from 0 to 1, are lost, the same ones in each run.

For kernels that have no netem. With PACKET_VNET_HDR frames keep what is said of their
checksums and segments, so those of 64 KiB pass as they are.
"""

import collections
import random
import select
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _ETH_P_ALL, _PACKET_OUTGOING = 263, 15, 3, 4
_SO_RCVBUFFORCE = 33


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


def main() -> None:
    first, second = _port(sys.argv[1]), _port(sys.argv[2])
    delay, lost = float(sys.argv[3]) / 1000, float(sys.argv[4])
    numbers = random.Random(0)
    other = {first: second, second: first}
    queue: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    buffer = bytearray(70_000)
    while True:
        pause = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for port in select.select([first, second], [], [], pause)[0]:
            for _ in range(64):
                try:
                    size, address = port.recvfrom_into(buffer)
                except BlockingIOError:
                    break
                if address[2] == _PACKET_OUTGOING:  # our own
                    continue
                if numbers.random() >= lost:
                    due = time.monotonic() + delay
                    queue.append((due, other[port], bytes(buffer[:size])))
        while queue and queue[0][0] <= time.monotonic():
            _, port, frame = queue.popleft()
            port.send(frame)


if __name__ == "__main__":
    main()
