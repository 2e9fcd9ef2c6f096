"""Downloads against a server that loses connections, ignores ranges, and sends the wrong thing."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from atoll.data import MNIST
from atoll.data import download as module
from atoll.data.download import Remote, Resume, find, folders, obtain
from atoll.errors import DataError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SUM = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Server:
    """What the server does, and what it was asked."""

    content: bytes = CONTENT
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes after which each of the next connections dies
    statuses: list[int] = field(default_factory=list)  # answers to the next requests
    requests: list[str | None] = field(default_factory=list)  # Range headers
    port: int = 0

    def remote(self, **changes: object) -> Remote:
        fields = {"name": "file.bin", "md5": SUM, "urls": (f"http://127.0.0.1:{self.port}/file.bin",)}
        return Remote(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.requests.append(asked)
            if state.statuses and (status := state.statuses.pop(0)) != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.ranges else 0
            size = len(state.content)
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            end = start + state.cuts.pop(0) if state.cuts else size
            self.wfile.write(state.content[start:end])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_downloads_once(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = obtain(server.remote(), [tmp_path / "a", tmp_path], progress=lambda *now: seen.append(now))
    assert path == tmp_path / "a" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "a") == ["file.bin"]
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert obtain(server.remote(), [tmp_path / "a", tmp_path]) == path
    assert len(server.requests) == 1


def test_resumes_lost_connections(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000] * 8  # more often than attempts without progress would allow
    path = obtain(server.remote(), [tmp_path])
    assert path.read_bytes() == CONTENT
    assert server.requests[:3] == [None, "bytes=100000-", "bytes=200000-"]


def test_resumes_an_earlier_run(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:12345])
    assert obtain(server.remote(), [tmp_path]).read_bytes() == CONTENT
    assert server.requests == ["bytes=12345-"]
    assert names(tmp_path) == ["file.bin"]


def test_a_complete_part_needs_no_bytes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert obtain(server.remote(), [tmp_path]).read_bytes() == CONTENT


@pytest.mark.parametrize("old", [b"something else", CONTENT + b"and more"])
def test_the_part_of_another_file(server: Server, tmp_path: Path, old: bytes) -> None:
    (tmp_path / "file.bin.part").write_bytes(old)
    assert obtain(server.remote(), [tmp_path]).read_bytes() == CONTENT


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [100_000]
    assert obtain(server.remote(), [tmp_path]).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=100000-"]


def test_gives_up_without_progress(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [100_000] * 50
    with pytest.raises(DataError, match=r"cannot download file.bin .* put it into"):
        obtain(server.remote(), [tmp_path])
    assert 3 <= len(server.requests) <= 8
    # What came so far stays for the next run.
    assert names(tmp_path) == ["file.bin.part"]


def test_busy_servers_are_asked_again_and_refusals_are_not(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    assert obtain(server.remote(), [tmp_path / "a"]).read_bytes() == CONTENT
    server.requests.clear()
    server.statuses = [404] * 5
    with pytest.raises(DataError, match="HTTP status 404"):
        obtain(server.remote(), [tmp_path / "b"])
    assert len(server.requests) == 1


def test_mirrors(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    url = server.remote().urls[0]
    assert obtain(server.remote(urls=(url, url + "?mirror")), [tmp_path]).read_bytes() == CONTENT


def test_wrong_content_is_never_put_in_place(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="wrong checksum"):
        obtain(server.remote(), [tmp_path])
    assert names(tmp_path) == []


def test_a_present_wrong_file_is_neither_used_nor_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError) as caught:
        obtain(server.remote(), [tmp_path / "a", tmp_path])
    message = str(caught.value)
    for part in (str(tmp_path / "file.bin"), SUM, hashlib.md5(b"mine").hexdigest(), "delete it"):
        assert part in message
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.requests == []


def test_without_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file.bin is missing; put it into"):
        obtain(Remote("file.bin", SUM, ()), [tmp_path], download=False)
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte.gz is missing; put it into {tmp_path}/mnist"):
        _ = MNIST(root=tmp_path, download=False).train


def test_without_network(tmp_path: Path) -> None:
    remote = Remote("file.bin", SUM, ("http://127.0.0.1:9/file.bin",))
    with pytest.raises(DataError) as caught:
        obtain(remote, [tmp_path])
    assert str(caught.value) == (
        "cannot download file.bin (http://127.0.0.1:9/file.bin: no connection); download"
        f" http://127.0.0.1:9/file.bin manually and put it into {tmp_path}"
    )


def test_a_place_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot write"):
        obtain(server.remote(), [tmp_path / "file" / "a"])


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "file.bin").mkdir()
    with pytest.raises(DataError, match=r"file.bin: cannot be read"):
        obtain(Remote("file.bin", SUM, ()), [tmp_path])


def test_two_at_once(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000] * 3
    threads = [threading.Thread(target=obtain, args=(server.remote(), [tmp_path])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.requests) == 4  # by the first one alone


def test_nothing_is_printed_and_the_logger_stays_as_it_was(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    level = pooch.get_logger().level
    obtain(server.remote(), [tmp_path])
    assert capfd.readouterr() == ("", "")
    assert pooch.get_logger().level == level != logging.WARNING


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders("mnist", tmp_path) == (tmp_path / "mnist", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (default,) = folders("mnist", None)
    assert default.parts[-2:] == ("atoll", "mnist")
    (tmp_path / "mnist").mkdir()
    for place in (tmp_path, tmp_path / "mnist"):  # the data set's own folder wins
        (place / "b").write_bytes(b"")
        assert find(["a", "b"], folders("mnist", tmp_path)) == place / "b"


def test_the_downloader_alone(server: Server, tmp_path: Path) -> None:
    """The documented protocol of pooch: any callable of url, output file and pooch."""
    downloader = Resume(tmp_path / "x.part")
    downloader(server.remote().urls[0], tmp_path / "x", None)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["x"]
