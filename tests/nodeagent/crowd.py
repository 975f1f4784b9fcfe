"""A crowd that asks a TCP listener as fast as it can.

    crowd.py PORT CONNECTIONS SECONDS [PATH [once | probe]]

As any user of the host can run it. Each connection sends requests without waiting for answers, and
begins anew when it is closed. ``once``: each sends one and begins anew after the answer; ``probe``:
it does so as kubelet does. Prints a line at the start, and at the end how many answers came.
"""

import os
import selectors
import socket
import sys
import time


def main() -> None:
    port, connections, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    path = sys.argv[4] if len(sys.argv) > 4 else "/metrics"
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    kind = sys.argv[5] if len(sys.argv) > 5 else ""
    close = "Connection: close\r\n" if kind == "probe" else ""
    many = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{close}\r\n".encode()
    many *= 1 if kind else 16
    chosen, answers, end = selectors.DefaultSelector(), 0, time.monotonic() + seconds

    def begin() -> None:
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex(("127.0.0.1", port))
        chosen.register(made, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def again(old: socket.socket) -> None:
        chosen.unregister(old)
        old.close()
        begin()

    for _ in range(connections):
        begin()
    print("all have come", flush=True)
    while time.monotonic() < end:
        for key, ready in chosen.select(0.1):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            try:
                if ready & selectors.EVENT_WRITE:
                    peer.send(many)
                    if kind:
                        chosen.modify(peer, selectors.EVENT_READ)
                if ready & selectors.EVENT_READ:
                    read = peer.recv(2**20)
                    answers += read.count(b"HTTP/1.1 ")
                    if kind or not read:
                        again(peer)
            except BlockingIOError:
                pass
            except OSError:
                again(peer)
    print(answers)


main()
