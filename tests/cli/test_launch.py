"""The store of a run without torchrun: which addresses it listens on, and that processes find each other through it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from roundpipe.cli import launch

SCRIPT = """
import json, os
from roundpipe.cli.launch import Launch

def listening():
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    return [row[1] for row in rows if row[1].endswith(":" + port) and row[3] == "0A"]

with Launch.joined() as launch:
    found = launch.gathered([launch.rank, listening() if launch.is_first else None])
    if launch.is_first:
        print(json.dumps(found))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "localhost"])
def test_the_store_listens_on_the_address_of_the_run_alone(host: str) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], done
    address = f"0100007F:{int(variables['MASTER_PORT']):04X}"  # 127.0.0.1
    assert done[0][0].strip() == f'[[0, ["{address}"]], [1, null]]'


@pytest.mark.parametrize(
    ("host", "addresses", "listens_on"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("::1", ["::1"], "::1"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("node-1", ["127.0.1.1"], None),  # as on Debian: the others know it by another address
        ("node-1", ["10.0.0.1", "10.1.0.1"], None),
        ("node-1", ["192.0.2.1"], None),  # not of this machine: behind a translation of addresses
        ("nowhere", [], None),
    ],
)
def test_the_address_on_which_a_store_listens(
    host: str, addresses: list[str], listens_on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*args: Any, **options: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in addresses]
        return [(kind, socket.SOCK_STREAM, 6, "", (address, 0)) for kind, address in kinds]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listener = launch._listener(host, 0)
    if listener is None and listens_on == "::1":
        pytest.skip("this machine has no IPv6")
    found = None if listener is None else listener.getsockname()[0]
    if listener is not None:
        listener.close()
    assert found == listens_on


def test_a_port_in_use_is_left_to_torch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert launch._listener("127.0.0.1", taken.getsockname()[1]) is None
