"""Mooncake's master: starts one with the flags of the guide, or checks a running one."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.config import is_loopback
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings, package_folder
from kvrecall.pool.remote.mooncake.store import MooncakeStore

_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class MasterFlags:
    """How to run a master. Beyond loopback it requires ``allow_plaintext``."""

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9003
    eviction_high_watermark_ratio: float = 0.8
    eviction_ratio: float = 0.05
    rpc_thread_num: int = 128
    allow_plaintext: bool = False

    def command(self) -> list[str]:
        """The command line. Raises ConfigError, TierError."""
        if not (self.allow_plaintext or is_loopback(self.host)):
            raise ConfigError(
                f"--host: {self.host} is not this machine's loopback, and Mooncake's "
                "traffic is in the clear and without authentication; isolate the port from "
                "other networks, then pass --allow-plaintext"
            )
        folder = package_folder()
        if folder is None:
            raise TierError("Mooncake is not installed; pip install 'kvrecall[mooncake]'")
        return [
            str(folder / "mooncake_master"),
            f"--rpc_port={self.port}",
            f"--rpc_address={self.host}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self.metrics_port}",
            f"--eviction_high_watermark_ratio={self.eviction_high_watermark_ratio}",
            f"--eviction_ratio={self.eviction_ratio}",
            f"--rpc_thread_num={self.rpc_thread_num}",
        ]


def run_master(flags: MasterFlags, started: Callable[[], None], quiet: bool = True) -> int:
    """Runs a master in the foreground until it ends or receives SIGTERM or SIGINT; returns its
    status. Calls ``started`` once it runs. It ends with this thread, however that ends. Raises
    ConfigError if a port is taken."""
    command = flags.command()
    check = f"kvrecall pool master --check {flags.host}:{flags.port}"
    _check_port(flags.host, flags.port, "--port", f" (if it is a master: {check})")
    _check_port(flags.host, flags.metrics_port, "--metrics-port")
    environment = {"GLOG_minloglevel": "1", **os.environ} if quiet else dict(os.environ)
    libc, us = ctypes.CDLL(None), os.getpid()

    def end_with_us() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != us:  # which ended before that
            os._exit(1)

    process = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=end_with_us)
    started()
    stopping = False

    def stop(number: int, _: object) -> None:
        nonlocal stopping
        stopping = True
        process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while process.poll() is None and not stopping:
        time.sleep(0.1)
    try:
        status = process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return 0 if stopping else status


def _check_port(host: str, port: int, option: str, about: str = "") -> None:
    """Raises ConfigError if nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"is in use; stop its process{about} or choose another port"
        else:
            why = f"cannot be listened on: {error.strerror}; choose another"
        raise ConfigError(f"{option}: {port} on {host} {why}") from error


def check_master(host: str, port: int) -> float:
    """Seconds that a real client takes to join the master and query it. Raises TierError."""
    began = time.monotonic()
    setup = {
        "local_hostname": "localhost" if is_loopback(host) else host,
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 1 << 20,
        "master_server_address": f"{host}:{port}",
    }
    store = MooncakeStore(MooncakeSettings.of(setup))
    try:
        store.exists(["kvrecall-check"])
    finally:
        store.close()
    return time.monotonic() - began
