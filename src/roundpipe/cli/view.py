"""The command `roundpipe view`: the reports of the runs of a folder in a browser, while they run and afterwards.

A server of the standard library on the loopback interface. It answers with pages that it makes from the metrics,
samples and settings of the runs that it has found; no path of a request reaches the file system, and it writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from roundpipe.cli.console import say
from roundpipe.errors import ConfigError
from roundpipe.report.page import escaped, html_page
from roundpipe.report.runs import WatchedRun, address_of, find_runs, overview_page

logger = logging.getLogger("roundpipe")
_PORT = 8642  # tried first, so that a tunnel to it can be set up once
_IDLE_LIMIT_S = 30  # of a connection without a request
_COSTS_KEPT = 20  # a page is made again after this multiple of the time that making it took
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def run(words: Sequence[str]) -> int:
    """Serve until Ctrl-C. Raises ConfigError for a folder without runs and an address that cannot be used."""
    options = parser().parse_args(list(words))
    pages = Pages(Path(options.folder))
    server = opened(pages, options.host, options.port)
    host, port = str(server.server_address[0]), int(server.server_address[1])
    shown = "localhost" if _is_loopback(host) else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/"
    say(f"{pages.summary}: {url}")
    if _is_loopback(host):
        say(f"from another machine: ssh -L {port}:localhost:{port} {socket.gethostname()}, and the same address there")
    else:
        logger.warning("--host %s: everyone who reaches port %d of this machine can read the reports", host, port)
    say("Ctrl-C ends it")
    if not options.no_browser and _has_browser():
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="roundpipe view",
        description="Show runs in a browser, while they run and afterwards: one run, or all of a folder side by side.",
    )
    parser.add_argument("folder", metavar="RUN_OR_FOLDER", help="the --out of a run, or a folder of several")
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {_PORT}, or a free one if it is taken")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    return parser


def _is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _has_browser() -> bool:
    """Whether a browser with windows can be opened here, and not on another machine or in the terminal."""
    has_windows = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_windows and "SSH_CONNECTION" not in os.environ


class Pages:
    """The pages of the server by their paths. Used by several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no run."""
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; give the --out of a run, or a folder of several.")
        self._folder = folder
        self._runs: dict[str, WatchedRun] = {}
        self._made: dict[str, tuple[object, float, str]] = {}  # by path: version, the time up to which it is kept, page
        self._lock = threading.Lock()  # matplotlib has one set of settings for all threads
        self._find()
        if not self._runs:
            raise ConfigError(
                f"there is no run in {folder}: no folder in it has a metrics.jsonl. Give the --out of a run, or a "
                "folder of several; a run has its first file when its training begins."
            )
        self._is_single = "." in self._runs

    @property
    def summary(self) -> str:
        number = len(self._runs)
        return f"the run {self._folder}" if self._is_single else f"{number} run{'s' * (number > 1)} of {self._folder}"

    def _find(self) -> None:
        names = find_runs(self._folder)
        self._runs = {name: self._runs.get(name) or WatchedRun(self._folder / name, name) for name in names}

    def page(self, path: str) -> str | None:
        """The page at the path of an address; None if there is none."""
        with self._lock:
            if path == "/" and not self._is_single:
                self._find()
                runs = list(self._runs.values())
                for each in runs:
                    each.refresh()
                title = self._folder.absolute().name or str(self._folder)
                return self._kept(path, [each.version for each in runs], lambda: overview_page(title, runs))
            found = self._runs["."] if self._is_single and path == "/" else self._run_at(path)
            if found is None:
                return None
            found.refresh()
            return self._kept(path, found.version, lambda: found.page("" if self._is_single else "/"))

    def _run_at(self, path: str) -> WatchedRun | None:
        return next((each for each in self._runs.values() if unquote(address_of(each)) == path), None)

    def _kept(self, path: str, version: object, make: Callable[[], str]) -> str:
        """The page that was made before, if nothing has changed or making it again so soon would take much time."""
        before, until, page = self._made.get(path, (None, 0.0, ""))
        begun = time.monotonic()
        if page and (before == version or begun < until):
            return page
        page = make()
        cost_s = time.monotonic() - begun
        self._made[path] = (version, begun + _COSTS_KEPT * cost_s, page)
        return page


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with pages; the base class refuses all other methods."""

    timeout = _IDLE_LIMIT_S
    server: _Server
    server_version, sys_version = "roundpipe", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        page, status = None, HTTPStatus.NOT_FOUND
        if not self.server.may_answer(self.headers.get("Host", "")):
            status = HTTPStatus.FORBIDDEN
        else:
            try:
                page = self.server.pages.page(unquote(urlsplit(self.path).path))
            except Exception as error:
                logger.exception("the page %s could not be made", self.path)
                status, page = HTTPStatus.INTERNAL_SERVER_ERROR, _message("The page could not be made", repr(error))
            else:
                status = HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK
        body = (page or _message(status.phrase, "There is no such page here.")).encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


def _message(title: str, text: str) -> str:
    body = f'<header><p><a href="/">all runs</a></p><h1>{escaped(title)}</h1><p>{escaped(text)}</p></header>'
    return html_page(title, body)


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, pages: Pages) -> None:
        self.pages = pages
        self.address_family = family
        super().__init__(address, _Handler)

    def may_answer(self, host: str) -> bool:
        """Whether a request for this host is meant for us: a page of the internet may give its name our address."""
        if not _is_loopback(str(self.server_address[0])):
            return True
        name = urlsplit(f"//{host}").hostname or ""
        with contextlib.suppress(ValueError):
            return _is_loopback(name)
        return False

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a connection of %s ended", client_address, exc_info=True)  # the browser has left


def opened(pages: Pages, host: str, port: int | None) -> _Server:
    """A server that listens. Raises ConfigError if it cannot."""
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError(f"--port must be between 0 and {2**16 - 1}, got {port}; leave it out for a free one.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error}); leave it out.") from error
    for number in (_PORT, 0) if port is None else (port,):
        try:
            return _Server((str(address[0]), number), family, pages)
        except OSError as error:
            if port is None and number and error.errno == errno.EADDRINUSE:
                continue
            advice = "give another --port, or leave it out for a free one"
            raise ConfigError(f"cannot listen on {host}, port {number}: {error.strerror}; {advice}.") from error
    raise AssertionError("port 0 is never taken")
