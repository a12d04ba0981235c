"""Long-lived processes of the local stack: started detached, found again by a mark, stopped completely.

A service such as a Ray head starts dozens of processes, some in sessions of their own and some whose parent dies
first. So everything we start carries a mark in its environment, which its descendants inherit, and stopping looks for
the mark as well as for descendants. Nothing else on the machine can be hit: never a match by name.
"""

import contextlib
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from fathom.errors import ServiceError

MARK = "FATHOM_STACK"


@dataclass(frozen=True)
class Service:
    """One started process: its name, process id and start time (an id alone is reused by the system)."""

    name: str
    pid: int
    started: float

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return process_of(self) is not None


def process_of(service: Service) -> psutil.Process | None:
    """The process behind a service, or None when it ended (or only its zombie is left)."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(service.pid)
        same = abs(process.create_time() - service.started) < 1.0
        if same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def spawn(name: str, command: list[str], environment: dict[str, str], mark: str, log: Path) -> Service:
    """Start a command detached from this terminal, its output in ``log``."""
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Service(name, child.pid, psutil.Process(child.pid).create_time())


def family(services: list[Service], mark: str) -> list[psutil.Process]:
    """Every process that the services started, and the services themselves; never this process."""
    found: set[psutil.Process] = set()
    for service in services:
        process = process_of(service)
        if process is not None:
            found.add(process)
            with contextlib.suppress(psutil.Error):
                found.update(process.children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.add(process)
    return [process for process in found if process.pid != os.getpid()]


def stop_family(services: list[Service], mark: str, grace_s: float) -> None:
    """Ask the services to end, give them ``grace_s`` seconds, then end whatever of theirs is left."""
    members = family(services, mark)
    leaders = [process for process in map(process_of, services) if process is not None]
    for process in leaders:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(leaders, timeout=grace_s)
    members = [process for process in {*members, *family(services, mark)} if process.is_running()]
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(members, timeout=3.0)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=3.0)


def claim_port(name: str, port: int) -> int:
    """A port of 127.0.0.1 that nothing listens on: ``port`` itself, or any free one for 0.

    Raises:
        ServiceError: something else already listens there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            option = f"--{name.lower()}-port"
            raise ServiceError(
                f"port {port} of 127.0.0.1, wanted for {name}, is in use",
                f"stop what listens there, or choose another with {option} ({option} 0 takes any free one)",
            ) from error
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, for an error message."""
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""
