"""`roundpipe view`: a real server on the loopback interface, its pages, what it refuses, and its mistakes."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundpipe.__main__ import main
from roundpipe.cli import view
from roundpipe.cli.view import Pages, opened
from roundpipe.errors import ConfigError
from roundpipe.report import MetricsWriter, RunRecord

SECRET = "the content of a file beside the metrics"


def row(step: int, loss: float) -> dict[str, Any]:
    return {"type": "train", "step": step, "loss": loss, "tokens_per_s": 1000.0, "step_s": 1.0, "time": time.time()}


def new_run(folder: Path, losses: list[float], *, max_steps: int = 10, ended: bool = False) -> MetricsWriter:
    """The files of a run with these losses. Returns the open metrics."""
    writer = MetricsWriter(folder / "metrics.jsonl")
    start = {"step": 0, "time": time.time() - 60, "devices": ["cpu:0"]}
    about = {"run": {"name": folder.name, "base model": "tiny", "data": "<chats>.jsonl", "price per hour": 3600.0}}
    RunRecord(about, [start], max_steps=max_steps, ended=time.time() if ended else None).write(folder)
    for step, loss in enumerate(losses, start=1):
        writer.write(row(step, loss))
    writer.write({"type": "eval", "step": len(losses), "eval_loss": 0.125, "time": time.time()})
    (folder / "secret.txt").write_text(SECRET)
    return writer


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[tuple[Path, MetricsWriter]]:
    """A folder with one run that is running and one that has ended; its metrics are open."""
    folder = tmp_path / "runs"
    with contextlib.closing(new_run(folder / "first", [3.0, 2.0])) as writer:
        new_run(folder / "group" / "second one", [4.0] * 10, ended=True).close()
        yield folder, writer


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server of this folder."""
    server = opened(Pages(folder), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, Any]:
    """Status, body and headers of an answer. The path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=host is not None)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def test_a_folder_is_a_table_of_its_runs_that_grows_with_them(
    runs: tuple[Path, MetricsWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, writer = runs
    monkeypatch.setattr(view, "_COSTS_KEPT", 0)
    with served(folder) as port:
        status, page, headers = asked(port, "/")
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert "2 runs, 1 running" in page
        assert '<a href="/run/first/">first</a><small>tiny · &lt;chats&gt;.jsonl</small>' in page
        assert '<a href="/run/group/second%20one/">group/second one</a>' in page
        for cell in ("running", "complete", "2 of 10", "10 of 10", "0.125", "1,000"):
            assert f">{cell}<" in page
        assert page.count("<svg") == 2
        assert 'http-equiv="refresh"' in page
        writer.write(row(3, 0.0625))
        new_run(folder / "third", [1.0]).close()
        page = asked(port, "/")[1]
        assert ">0.0625<" in page
        assert "3 runs, 2 running" in page


def test_a_page_is_not_made_again_before_it_has_paid_off(
    runs: tuple[Path, MetricsWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, writer = runs
    monkeypatch.setattr(view, "_COSTS_KEPT", 1e9)
    pages = Pages(folder)
    before = pages.page("/run/first/")
    writer.write(row(3, 0.0625))
    assert pages.page("/run/first/") is before
    monkeypatch.setattr(view, "_COSTS_KEPT", 0)
    pages = Pages(folder)
    after = pages.page("/run/first/")
    assert pages.page("/run/first/") is after  # nothing has changed
    writer.write(row(4, 0.5))
    assert "step 4 of 10" in str(pages.page("/run/first/"))


def test_a_run_has_its_report(runs: tuple[Path, MetricsWriter]) -> None:
    folder, _ = runs
    with served(folder) as port:
        _, running, _ = asked(port, "/run/first/")
        _, ended, _ = asked(port, "/run/group/second%20one/")
    assert "Running: step 2 of 10" in running
    assert 'http-equiv="refresh"' in running
    assert '<a href="/">all runs</a>' in running
    assert "Complete at step 10 of 10." in ended
    assert 'http-equiv="refresh"' not in ended
    with served(folder / "first") as port:
        _, alone, _ = asked(port, "/")
    assert "Running: step 2 of 10" in alone
    assert "all runs" not in alone


@pytest.mark.parametrize(
    "path",
    [
        "/run/first/secret.txt",
        "/run/first/metrics.jsonl",
        "/run/first/../first/secret.txt",
        "/run/../runs/first/secret.txt",
        "/run/first%2Fsecret.txt/",
        "/run/first/..%2f..%2f..%2fetc/passwd",
        "/../../../../etc/passwd",
        "//etc/passwd",
        "/run/%2e%2e/",
        "/run/first%00/",
        "/run/nothing/",
        "/secret.txt",
    ],
)
def test_no_file_is_served(runs: tuple[Path, MetricsWriter], path: str) -> None:
    with served(runs[0]) as port:
        status, body, _ = asked(port, path)
    assert status == 404
    assert SECRET not in body
    assert "root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_that_write_are_refused(runs: tuple[Path, MetricsWriter], method: str) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()}

    before = files()
    with served(runs[0]) as port:
        assert asked(port, "/run/first/", method)[0] == 501
        status, body, headers = asked(port, "/", "HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 0
    assert files() == before


def test_another_site_with_our_address_is_refused(runs: tuple[Path, MetricsWriter]) -> None:
    with served(runs[0]) as port:
        found = {host: asked(port, "/run/nothing/", host=host)[0] for host in ("evil.example", "evil.example:80", "")}
        tunnel = {host: asked(port, "/run/nothing/", host=host)[0] for host in ("localhost:1", "127.0.0.1", "[::1]:2")}
    assert set(found.values()) == {403}
    assert set(tunnel.values()) == {404}  # ssh -L gives any port


def test_damaged_files_are_named_and_the_rest_is_shown(runs: tuple[Path, MetricsWriter]) -> None:
    folder, writer = runs
    with (folder / "first" / "metrics.jsonl").open("ab") as file:
        file.write(b"<damage>\n")
    writer.write(row(3, 0.0625))
    (folder / "group" / "second one" / "run.json").write_text("[")
    with served(folder) as port:
        pages = [asked(port, path)[1] for path in ("/", "/run/first/")]
        second = asked(port, "/run/group/second%20one/")[1]
    for page in pages:
        assert "metrics.jsonl: line 4 is not a JSON object of a step" in page
        assert "3 of 10" in page
    assert "run.json is damaged" in second


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "new" / "metrics.jsonl").close()
    with served(tmp_path) as port:
        assert "1 run, " in asked(port, "/")[1]
        assert "The run has no complete step yet." in asked(port, "/run/new/")[1]


def test_a_run_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    new_run(tmp_path, [3.0, 2.0, 1.0]).close()
    run = view.WatchedRun(tmp_path, ".")
    run.refresh()
    assert [one["step"] for one in run.rows] == [1, 2, 3, 3]
    with contextlib.closing(MetricsWriter(tmp_path / "metrics.jsonl", resumed_step=2)) as writer:
        writer.write(row(3, 9.0))
        writer.write(row(4, 8.0))
    run.refresh()
    assert [one.get("loss") for one in run.rows] == [3.0, 2.0, 9.0, 8.0]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "loss"')
        file.flush()
        run.refresh()
        file.write(b": 7.0}\n")
    run.refresh()
    assert [one.get("loss") for one in run.rows] == [3.0, 2.0, 9.0, 8.0, 7.0]


def test_the_order_of_runs_stays_while_they_run(tmp_path: Path) -> None:
    """The one that was started last comes first, whichever has written last: charts keep their colours."""
    writers = [new_run(tmp_path / name, [1.0]) for name in ("a", "b")]
    runs = [view.WatchedRun(tmp_path / name, name) for name in ("a", "b")]
    for writer in reversed(writers):
        writer.write(row(2, 1.0))
        for run in runs:
            run.refresh()
        page = view.overview_page("runs", runs)
        assert page.index("/run/b/") < page.index("/run/a/")
        writer.close()


def test_the_usual_port_is_given_up_if_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(tmp_path, [1.0]).close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(view, "_PORT", taken)
        with opened(Pages(tmp_path), "127.0.0.1", None) as server:
            assert server.server_address[1] not in (0, taken)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {taken}: .*; give another --port"):
            opened(Pages(tmp_path), "127.0.0.1", taken)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nothing"], "there is no folder nothing"),
        (["empty"], "there is no run in empty: no folder in it has a metrics.jsonl. Give the --out of a run"),
        (["run", "--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["run", "--host", "no such host"], "--host no such host is no address of this machine"),
    ],
)
def test_mistakes(
    words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    new_run(tmp_path / "run", [1.0]).close()
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words]) == 2
    assert part in capsys.readouterr().err


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    new_run(tmp_path, [1.0]).close()
    command = [sys.executable, "-m", "roundpipe", "view", str(tmp_path), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        port = int(lines[0].rsplit(":", 1)[1].strip().rstrip("/"))
        assert lines[0] == f"the run {tmp_path}: http://localhost:{port}/\n"
        assert f"ssh -L {port}:localhost:{port}" in lines[1]
        assert asked(port, "/nothing")[0] == 404
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_browser_is_opened_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    assert not view._has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view._has_browser()
    monkeypatch.setenv("SSH_CONNECTION", "there here")
    assert not view._has_browser()
