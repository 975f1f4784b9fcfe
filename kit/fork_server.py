"""The process that the agent's calls and some of its workers fork from (``kit.forks`` asks it).

An interpreter with the modules of a call costs an eighth of a second of a processor, and an agent
makes thirty calls while it starts. So one process without threads loads each module once, and a
child is a fork of it: some milliseconds, and the memory of the modules is shared.

A request is one packet on stdin: a job and a target ("call module:function"), with the ends of some
sockets: control, and the child's first descriptors. On control the server answers twice: with the
child's pid and its pidfd (or a negative errno), and when it has ended with its code (or, negative,
the signal that ended it).

Jobs: ``call`` has stdin, stdout and stderr, gets arguments and says an outcome; ``run`` has stdin
and stdout, and talks by itself (``kit.messages``) until its function or the server ends.

Invariants: a child dies with the server, and the server with the agent. The server has one thread
and runs no code of a child; it loads modules, and in nothing else it can hang. A pid is not free
again until the agent has closed control: whoever kills by pid meets nobody else.
"""

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import socket
import sys
from dataclasses import dataclass

from kit import child_main, messages

REQUEST_BYTES = 4096
STREAMS = {"call": 3, "run": 2}  # descriptors of a child, by its job
ENDS = 1 + max(STREAMS.values())  # of a request


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int
    control: socket.socket


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._asked = True  # for more
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._running: dict[int, _Child] = {}  # by pidfd
        self._ended: dict[int, _Child] = {}  # by the descriptor of control

    def serve(self) -> None:
        """Until the agent closes the channel and the last child has ended."""
        while self._asked or self._running or self._ended:
            for ready, _ in self._poll.poll():
                if child := self._running.pop(ready, None):
                    self._tell_end(child)
                elif child := self._ended.pop(ready, None):
                    self._reap(child)
                else:
                    self._take()

    def _take(self) -> None:
        """Fork for one request, or say why not."""
        request, ends, *_ = socket.recv_fds(self._channel, REQUEST_BYTES, ENDS)
        if not request:
            self._asked = False
            self._poll.unregister(self._channel)
        if not ends:  # none fits: the agent sees that control is closed
            return
        control = socket.socket(fileno=ends[0])
        try:
            self._fork(request.decode(), control, ends[1:])
        except OSError as error:
            with contextlib.suppress(OSError):  # the agent does not wait for it any more
                control.send(str(-(error.errno or errno.EAGAIN)).encode())
            control.close()
        for each in ends[1:]:
            os.close(each)

    def _fork(self, request: str, control: socket.socket, streams: list[int]) -> None:
        job, _, target = request.partition(" ")
        if len(streams) < STREAMS[job]:
            raise OSError(errno.EMFILE, "no descriptors for a child")
        module, _, name = target.partition(":")
        # The next child need not load it. One that cannot be loaded fails in its own child.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        sys.stdout.flush()  # or a child would say it again
        gc.freeze()  # a collection in a child would copy what is shared
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            child_main.end_after(lambda: _child(server, job, module, name, streams))
        # Child and server set it: the agent can kill the group as soon as it knows the pid.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, child_main.SIGKILL)  # it waits for its arguments
            os.waitpid(pid, 0)
            raise
        self._running[pidfd] = _Child(pid, pidfd, control)
        self._poll.register(pidfd, select.POLLIN)
        with contextlib.suppress(OSError):
            socket.send_fds(control, [str(pid).encode()], [pidfd])

    def _tell_end(self, child: _Child) -> None:
        """Say how a child ended; it stays a zombie until the agent has heard it."""
        self._poll.unregister(child.pidfd)
        ended = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # the pidfd says so
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(OSError):
            child.control.send(str(code).encode())
        self._ended[child.control.fileno()] = child
        self._poll.register(child.control, select.POLLIN)

    def _reap(self, child: _Child) -> None:
        self._poll.unregister(child.control)
        os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        child.control.close()


def _child(server: int, job: str, module: str, name: str, streams: list[int]) -> None:
    os.setpgid(0, 0)
    child_main.die_with_parent()
    if os.getppid() != server:
        sys.exit("the agent has ended")
    for place, each in enumerate(streams):
        os.dup2(each, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    child_main.name_process(f"{module.rpartition('.')[2]}:{name}")
    gc.enable()
    function = getattr(importlib.import_module(module), name)
    if job == "run":
        function()
    else:
        sys.stdout.write(messages.outcome(lambda: function(*json.load(sys.stdin))))
    sys.stdout.flush()


def main() -> None:
    child_main.name_process("calls")
    gc.disable()  # the server makes no garbage, and what it has loaded is shared
    _Server(socket.socket(fileno=os.dup(0))).serve()
