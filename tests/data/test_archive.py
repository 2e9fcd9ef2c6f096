"""Unpacking: honest archives arrive complete, hostile ones leave nothing behind."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.data import unpack
from atoll.errors import DataError, InputError

FILES = {"a/one.txt": b"one" * 1000, "a/b/two.txt": b"two", "./three.txt": b""}


def make_tar(path: Path, files: dict[str, bytes], *infos: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in infos:
            archive.addfile(info)
    return path


def make_zip(path: Path, files: dict[str, bytes], modes: dict[str, int] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (modes or {}).get(name, 0o644) << 16
            archive.writestr(info, content)
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "make",
    [
        lambda path: make_tar(path, FILES, mode="w"),
        lambda path: make_tar(path, FILES, mode="w:gz"),
        lambda path: make_tar(path, FILES, mode="w:xz"),
        lambda path: make_tar(path, FILES, special("a", tarfile.DIRTYPE), special(".", tarfile.DIRTYPE)),
        lambda path: make_zip(path, {**FILES, "c/": b""}),
    ],
)
def test_honest(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = unpack(make(tmp_path / "archive"), tmp_path / "x" / "out")
    assert content(folder) == {name.removeprefix("./"): data for name, data in FILES.items()}
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["out"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_links_inside(tmp_path: Path) -> None:
    links = [
        special("a/link", tarfile.SYMTYPE, "../three.txt"),
        special("folder", tarfile.SYMTYPE, "a/b"),
        special("hard", tarfile.LNKTYPE, "a/one.txt"),
    ]
    folder = unpack(make_tar(tmp_path / "x.tar", FILES, *links), tmp_path / "out")
    assert (folder / "a" / "link").read_bytes() == b""
    assert (folder / "folder" / "two.txt").read_bytes() == b"two"
    assert (folder / "hard").read_bytes() == FILES["a/one.txt"]
    assert (folder / "hard").stat().st_nlink == 1


HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absolute": (lambda p: make_tar(p, {"/etc/x": b"x"}), "relative paths"),
    "parent": (lambda p: make_tar(p, {"a/../../x": b"x"}), "relative paths"),
    "zip-parent": (lambda p: make_zip(p, {"../x": b"x"}), "relative paths"),
    "backslash": (lambda p: make_tar(p, {"..\\x": b"x"}), "relative paths"),
    "drive": (lambda p: make_tar(p, {"C:x": b"x"}), "relative paths"),
    "link-outside": (lambda p: make_tar(p, {}, special("l", tarfile.SYMTYPE, "../../x")), "links to members"),
    "link-absolute": (lambda p: make_tar(p, {}, special("l", tarfile.SYMTYPE, "/etc")), "links to members"),
    "link-nowhere": (lambda p: make_tar(p, {}, special("l", tarfile.SYMTYPE, "none")), "links to members"),
    "link-loop": (lambda p: make_tar(p, {}, special("l", tarfile.SYMTYPE, "l")), "links to members"),
    # Each looks harmless by its letters: q stays in a/b, but p is the top folder, so p/.. is outside.
    "link-chain": (
        lambda p: make_tar(
            p, FILES, special("a/b/p", tarfile.SYMTYPE, "../.."), special("a/b/q", tarfile.SYMTYPE, "p/..")
        ),
        "links to members",
    ),
    "through-link": (
        lambda p: _through_link(p),
        "unique names",
    ),
    "hard-outside": (lambda p: make_tar(p, {}, special("l", tarfile.LNKTYPE, "../x")), "links to members"),
    "zip-link": (
        lambda p: make_zip(p, {"l": b"../../x"}, {"l": stat.S_IFLNK | 0o777}),
        "links to members",
    ),
    "device": (lambda p: make_tar(p, {}, special("d", tarfile.CHRTYPE)), "special file"),
    "pipe": (lambda p: make_tar(p, {}, special("d", tarfile.FIFOTYPE)), "special file"),
    "zip-device": (lambda p: make_zip(p, {"d": b""}, {"d": stat.S_IFCHR}), "special file"),
    "twice": (lambda p: _twice(p), "unique names"),
    "twice-in-disguise": (lambda p: make_tar(p, {"x": b"1", "./x": b"2"}), "unique names"),
    "file-as-folder": (lambda p: make_tar(p, {"x": b"1", "x/y": b"2"}), "damaged or truncated"),
    "bomb": (lambda p: make_zip(p, {"zeros": bytes(10_000_000)}), "at most 1000000 bytes"),
    "many": (lambda p: make_tar(p, {f"{i}": b"" for i in range(2000)}), "at most 1000000 bytes"),
    "truncated": (lambda p: _cut(make_tar(p, FILES, mode="w:gz")), "damaged or truncated"),
    "truncated-plain": (lambda p: _cut(make_tar(p, FILES, mode="w")), "damaged or truncated"),
    "truncated-zip": (lambda p: _cut(make_zip(p, FILES)), "damaged or truncated"),
    "bad-header": (lambda p: _spoil(make_tar(p, FILES, mode="w"), 512 * 7 + 3), "damaged or truncated"),
    "bad-zip-data": (lambda p: _spoil(make_zip(p, FILES), 45), "damaged or truncated"),
    "no-archive": (lambda p: _write(p, b"hello"), "damaged or truncated"),
    "empty": (lambda p: _write(p, b""), "damaged or truncated"),
}


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _cut(path: Path) -> Path:
    data = path.read_bytes()
    return _write(path, data[: len(data) // 3])


def _spoil(path: Path, at: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    return _write(path, bytes(data))


def _twice(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x", b"2")
    return path


def _through_link(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.addfile(special("l", tarfile.SYMTYPE, "."))
        archive.addfile(tarfile.TarInfo("l/x"), io.BytesIO(b""))
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(tmp_path: Path, name: str) -> None:
    make, message = HOSTILE[name]
    archive = make(tmp_path / "archive")
    with pytest.raises(DataError, match=message) as caught:
        unpack(archive, tmp_path / "x" / "out", limit=1_000_000)
    assert str(archive) in str(caught.value)
    assert list((tmp_path / "x").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "x"]


def test_existing_destination_and_missing_archive(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "x.zip", FILES)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="already exists"):
        unpack(archive, tmp_path / "out")
    with pytest.raises(DataError, match="no such file"):
        unpack(tmp_path / "none.zip", tmp_path / "other")
