"""MNIST, Fashion-MNIST and KMNIST, read from idx files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.decode import as_images, as_labels
from atoll.data.download import Remote, find
from atoll.errors import DataError

_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
_CLOTHES = "t-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"


def _remotes(mirrors: tuple[str, ...], *sums: str) -> tuple[Remote, ...]:
    return tuple(
        Remote(name, md5, tuple(mirror + name for mirror in mirrors)) for name, md5 in zip(_FILES, sums, strict=True)
    )


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, raw or gzipped, whose items have the given shape.

    The format is: two zeros, 8 for unsigned bytes, the number of dimensions, the size of each dimension as a big-endian
    32-bit integer, and the bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "labels")
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     read_idx(path, ()).tolist()
    [7, 2, 1]
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated: {error}") from None
    dimensions = 1 + len(shape)
    start = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic or len(content) < start:
        raise DataError(f"{path}: expected an idx file that starts with {magic.hex()}, got {content[:4].hex()}")
    sizes = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if sizes[1:] != shape:
        raise DataError(f"{path}: expected items of shape {shape}, got {sizes[1:]}")
    length = start + int(np.prod(sizes, dtype=object))
    if len(content) != length:
        raise DataError(f"{path}: expected {length} bytes for {sizes[0]} items, got {len(content)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)


@DATA.register()
class MNIST(Data):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28 pixels.

    Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998).
    Reads the four published ``.gz`` files (and verifies their checksums), or the unpacked files (and verifies their
    structure).

    >>> MNIST(validation=0.05), MNIST().classes[:3]
    (MNIST(validation=0.05), ('0', '1', '2'))
    """

    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    files: ClassVar[tuple[Remote, ...]] = _remotes(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    )

    def load(self) -> Splits:
        train_images, train_labels, test_images, test_labels = (self._path(remote) for remote in self.files)
        return Splits(self._read(train_images, train_labels), self._read(test_images, test_labels))

    def _path(self, remote: Remote) -> Path:
        raw = remote.name.removesuffix(".gz")
        # Some programs unpack train-images-idx3-ubyte.gz to train-images.idx3-ubyte.
        path = find([remote.name, raw, raw.replace("-idx", ".idx")], self.folders)
        if path is not None and path.name != remote.name:
            return path
        return self._obtain(remote)

    @staticmethod
    def _read(images: Path, labels: Path) -> MemorySplit:
        pixels = as_images(read_idx(images, (28, 28)), str(images))
        return MemorySplit(pixels, as_labels(read_idx(labels, ()), len(pixels), str(labels)))


@DATA.register()
class FashionMNIST(MNIST):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28x28 pixels.

    H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms" (2017).

    >>> FashionMNIST().classes[-1]
    'ankle boot'
    """

    classes = tuple(_CLOTHES.split(", "))
    files = _remotes(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    )


@DATA.register()
class KMNIST(MNIST):
    """KMNIST: 60,000 training and 10,000 test images of cursive Japanese characters, 28x28 pixels.

    T. Clanuwat et al., "Deep Learning for Classical Japanese Literature" (2018).

    >>> KMNIST().num_classes
    10
    """

    classes = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
    files = _remotes(
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    )
