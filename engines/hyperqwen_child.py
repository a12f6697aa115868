"""Loaded by vLLM into each of its processes: they end when the server does, however it ends.

A server that is killed outright cannot close its engines; without this, theirs would hold the GPU's memory for ever.
The kernel's own signal on a parent's death is no use here: it comes when the *thread* that started the process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from typing import Final

SERVER: Final = "CITADEL_SERVER_PID"
"""The environment variable that tells them the server's number. Each load sets it, for its own start alone."""


def end_with_the_server() -> None:
    """vLLM's entry point for plugins, which runs in the server as well."""
    server = os.environ.get(SERVER)
    if server is not None and multiprocessing.parent_process() is not None:
        threading.Thread(target=_watch, args=(int(server),), name="server watch", daemon=True).start()


def _watch(server: int) -> None:
    try:
        descriptor = os.pidfd_open(server)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)
