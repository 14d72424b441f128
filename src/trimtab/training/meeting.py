"""Where the nodes of a run meet, and by which of its addresses this one takes part.

torchrun hands out a node's host name, and gloo takes the interface that this name leads to. Either may be
one that the other nodes cannot reach: a container's, a loopback. So the way to the meeting place decides:
what leads there leads to the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple, Self

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.units import parse_whole

JOIN_S = 120.0
"""How long the host where nodes meet may be silent: it may start last."""
ANSWER_S = 5.0
"""How long a program that listens there may take to show that it is torchrun."""
PATIENCE_S = 2.0
"""After this the wait is told."""
_PLACE = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]\s]+)):(?P<port>[0-9]+)")


class Meeting(NamedTuple):
    """A host and a port of it."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """From HOST:PORT.

        >>> Meeting.read("head:29400"), Meeting.read("[::1]:29400").host
        (Meeting(host='head', port=29400), '::1')
        """
        match = _PLACE.fullmatch(text)
        port = parse_whole(match["port"]) if match else None
        if match is None or port is None or not 0 < port < 2**16:
            raise WrongUse(
                f"--rendezvous {text}",
                found="it is no HOST:PORT with a port from 1 to 65535",
                cure="Write it like --rendezvous node1:29400, where node1 is one of the nodes.",
            )
        return cls(match["six"] or match["host"], port)

    def route(self) -> tuple[str, str]:
        """This machine's address on the way there, and the interface that has it."""
        # In Kubernetes a name comes with its pod; anywhere else it is there or will never be.
        found = self._addresses(JOIN_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0)
        family, kind, _, _, place = found[0]
        with contextlib.closing(socket.socket(family, kind)) as probe:
            try:
                # Nothing is sent: the kernel chooses the way.
                probe.connect(place)
            except OSError as error:
                raise self._fault(
                    f"no way leads there: {error.strerror or error}", "Look at the network of this node."
                ) from error
            address = str(probe.getsockname()[0])
        return address, _interface(address)

    def _addresses(self, patience_s: float) -> list[Any]:
        until = time.monotonic() + patience_s
        while True:
            try:
                return list(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM))
            except OSError as error:
                if time.monotonic() >= until:
                    raise self._fault(
                        f"there is no such host: {error.strerror or error}",
                        "Give the name or the address of a node as the others know it.",
                    ) from error
                time.sleep(1.0)

    def check(self, address: str) -> bool:
        """Whether this node has to be told that it is the host; raises where nobody can meet there."""
        there = {str(one[4][0]) for one in socket.getaddrinfo(self.host, self.port)}
        if address not in there and not any(one.startswith("127.") for one in there):
            self._wait_for_answer()
            return False
        if _is_free(address, self.port):
            return not _is_known(address)
        # Another node on this machine, or an agent that was faster; or something else.
        self._check_answers_as_torchrun()
        return False

    def _check_answers_as_torchrun(self) -> None:
        """A store answers at once; torch itself would wait for ever for a program that says nothing."""
        from torch._C._distributed_c10d import TCPStore

        answered = threading.Event()
        threading.Thread(target=self._greet, args=(TCPStore, answered), daemon=True).start()
        if not answered.wait(ANSWER_S):
            raise self._fault(
                "another program listens on that port, and it is not torchrun",
                f"Give another port to all nodes, or end what has {self.port}.",
            )

    def _greet(self, store: Any, answered: threading.Event) -> None:
        wait = timedelta(seconds=ANSWER_S)
        with contextlib.suppress(RuntimeError):
            store(self.host, self.port, None, is_master=False, timeout=wait, wait_for_workers=False)
            answered.set()

    def _wait_for_answer(self) -> None:
        """The host may be starting still."""
        began, told = time.monotonic(), False
        while True:
            try:
                socket.create_connection(self, timeout=ANSWER_S).close()
            except OSError as error:
                waited = time.monotonic() - began
                if waited > JOIN_S:
                    raise self._fault(
                        f"it did not answer within {JOIN_S:.0f} s: {error.strerror or error}",
                        "Start the run there too; every node must reach it by that name and port.",
                    ) from error
                if waited > PATIENCE_S and not told:
                    told = True
                    sys.stderr.write(f"trimtab: waiting for {self.host}:{self.port}, up to {JOIN_S:.0f} s\n")
                time.sleep(0.2)
            else:
                return

    def _fault(self, found: str, cure: str) -> EnvironmentFault:
        return EnvironmentFault(f"--rendezvous {self.host}:{self.port}", found=found, cure=cure)


def _interface(address: str) -> str:
    """The network interface that has an address; empty where none is found."""
    import psutil

    there = psutil.net_if_addrs().items()
    found = next((name for name, held in there if any(one.address == address for one in held)), "")
    return found or ("lo" if address.startswith("127.") else "")


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise EnvironmentFault(
                f"--rendezvous port {port}",
                found=f"this machine cannot listen on it: {error.strerror}",
                cure="Give a port from 1024 up that nothing else has.",
            ) from error
    return True


def _is_known(address: str) -> bool:
    """Whether torchrun knows an address for this machine's own: a loopback, or what its name leads to."""
    if address.startswith("127.") or address == "::1":
        return True
    with contextlib.suppress(OSError):
        return address in {str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None)}
    return False
