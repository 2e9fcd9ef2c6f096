"""Hostile and broken model files: each is refused in one sentence, without running code and within little memory."""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import struct
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atoll.adopt.sources import load_source
from atoll.errors import AtollError
from models.timm_support import HAS_TIMM

NET = """
from torch import nn

def build():
    return nn.Linear(2, 2)
"""
MEMORY = 2**30  # bytes that a refusal may use
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")


class Evil:
    def __reduce__(self):
        return (exec, ("open('ran', 'w').close()",))


def file(name, content):
    Path(name).write_bytes(content)
    return {"weights": name}


def saved(name, content, **options):
    torch.save(content, name, **options)
    return {"weights": name}


def safetensors(header, body=b"", name="net.safetensors", size=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return file(name, struct.pack("<Q", len(header) if size is None else size) + header + body)


def entry(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def pipe(name):
    os.mkfifo(name)
    return name


def compressed():
    torch.save(nn.Linear(2, 2).state_dict(), "whole.pt")
    with zipfile.ZipFile("whole.pt") as whole, zipfile.ZipFile("net.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    return {"weights": "net.pt"}


def half():
    torch.save(nn.Linear(2, 2).state_dict(), "whole.pt")
    content = Path("whole.pt").read_bytes()
    return file("net.pt", content[: len(content) // 2])


# Files of weights.
WEIGHTS = {
    "code": (lambda: saved("net.pt", Evil()), "could execute code"),
    "code in a checkpoint": (lambda: saved("net.pt", {"state_dict": {}, "args": Evil()}), "could execute code"),
    "a module": (lambda: saved("net.pt", nn.Linear(2, 2)), "could execute code"),
    "an old file with code": (
        lambda: saved("net.pt", Evil(), _use_new_zipfile_serialization=False), "could execute code"
    ),
    "a pickle": (lambda: file("net.pth", pickle.dumps(Evil())), "could execute code"),
    "an old pickle": (lambda: file("net.pth", pickle.dumps(Evil(), 0)), "not a file of torch.save"),
    "empty": (lambda: file("net.pt", b""), "not a file of torch.save"),
    "text": (lambda: file("net.pt", b"hello"), "not a file of torch.save"),
    "half": (half, "it is damaged"),
    "compressed": (compressed, "it is compressed"),
    "no tensors": (lambda: saved("net.pt", {"epoch": 3}), "expected a state dict"),
    "huge tensor": (
        lambda: saved("net.pt", {"weight": torch.zeros(1).expand(2**20, 2**20), "bias": torch.zeros(2)}),
        "different shapes",
    ),
    "other dtype": (
        lambda: saved("net.pt", {name: t.char() for name, t in nn.Linear(2, 2).state_dict().items()}), "torch.int8"
    ),
    "missing": (lambda: {"weights": "none.pt"}, "No such file"),
    "folder": (lambda: {"weights": "."}, "it is not a file"),
    "pipe": (lambda: {"weights": pipe("net.pt")}, "it is not a file"),
    "device": (lambda: {"weights": "/dev/zero"}, "it is not a file"),
    "empty safetensors": (lambda: file("net.safetensors", b""), "header too small"),
    "header longer than the file": (lambda: safetensors(b"{}", size=2**40), "header too large|invalid header length"),
    "nested header": (lambda: safetensors(b'{"a":' * 100_000), "recursion limit"),
    "overlap": (lambda: safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "invalid offset"),
    "overflow": (lambda: safetensors({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)), "overflow"),
    "negative": (lambda: safetensors({"a": entry([-1], 0, 4)}, bytes(4)), "invalid value"),
    "data beyond the file": (lambda: safetensors({"a": entry([2**34], 0, 2**36)}), "cannot read net.safetensors"),
    "name that is not UTF-8": (lambda: safetensors(b'{"\xff": {}}'), "invalid"),
}  # fmt: skip


def hugging_face(config, name="folder", **more):
    folder = Path(name)
    folder.mkdir()
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(content)
    save_file({"weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "evil.py").write_text("open('ran', 'w').close()")
    (folder / "modeling_evil.py").write_text("open('ran', 'w').close()")
    torch.save(Evil(), folder / "evil.pth")
    for file_name, text in more.items():
        (folder / f"{file_name}.json").write_text(text)
    return name


def timm_folder(**changes):
    return hugging_face({"architecture": "resnet10t", "num_classes": 2, **changes})


# Other models.
MODELS = {
    "program without trust": (lambda: file("net.pt2", pickle.dumps(Evil())) and "net.pt2", "use --trust"),
    "pipe as program": (lambda: pipe("net.pt2"), "it is not a file"),
    "pipe as ONNX file": (lambda: pipe("net.onnx"), "it is not a file"),
    "folder as ONNX file": (lambda: Path("net.onnx").mkdir() or "net.onnx", "it is not a file"),
    "no ONNX file": (lambda: "none.onnx", "there is no such file"),
    "pipe as code": (lambda: f"{pipe('code.py')}:build", "it is not a file"),
    "code with an error": (lambda: file("broken.py", b"def build(:") and "broken.py:build", "SyntaxError"),
    "no module": (lambda: "no.such.module:build", "cannot import no.such.module"),
    "checkpoint": (lambda: file("net.ckpt", b"") and "net.ckpt", "contains weights but no model"),
    "empty folder": (lambda: Path("empty").mkdir() or "empty", "expected config.json and model.safetensors"),
    "pipe as configuration": (
        lambda: (Path("folder").mkdir(), pipe("folder/config.json")) and "folder", "expected config.json"
    ),
    "own code": (
        lambda: hugging_face({"auto_map": {"AutoModelForImageClassification": "evil.Evil"}, "model_type": "evil"}),
        "refers to code or files from elsewhere",
    ),
    "backbone from elsewhere": (
        lambda: hugging_face({"model_type": "vit", "backbone": "hub/name"}), "refers to code or files from elsewhere"
    ),
    "deep configuration": (lambda: hugging_face(b'{"a":' * 100_000), "cannot read folder/config.json"),
    "list as configuration": (lambda: hugging_face([]), "expected a mapping in folder/config.json"),
    "text as configuration": (lambda: hugging_face(b"hello"), "cannot read folder/config.json"),
    "large configuration": (lambda: hugging_face(b" " * 2**25), "is larger than"),
    "many layers": (lambda: hugging_face({"model_type": "vit", "num_hidden_layers": 10**9}), "more than 1,000"),
    "preprocessor": (
        lambda: hugging_face({"model_type": "vit"}, preprocessor_config='{"rescale_factor": "x"}'),
        "expected a positive number as rescale_factor",
    ),
    "mean": (
        lambda: hugging_face({"model_type": "vit"}, preprocessor_config='{"image_mean": [{}], "image_std": 1}'),
        "expected numbers as mean and std",
    ),
    "deviation": (
        lambda: hugging_face({"model_type": "vit"}, preprocessor_config='{"image_mean": 0, "image_std": 0}'),
        "expected finite means and positive standard deviations",
    ),
}  # fmt: skip
TIMM = {
    "hub": (lambda: "timm:hf-hub:timm/resnet10t", "is not a name of timm's own models"),
    "old name of the hub": (lambda: "timm:hf_hub:timm/resnet10t", "is not a name of timm's own models"),
    "local folder": (lambda: f"timm:local-dir:{timm_folder()}", "is not a name of timm's own models"),
    "path": (lambda: "timm:../resnet10t", "is not a name of timm's own models"),
    "unknown name": (lambda: "timm:resnet10", "timm has no model 'resnet10'; did you mean"),
    "architecture from the hub": (lambda: timm_folder(architecture="hf-hub:a/b"), "is not a name of timm's own models"),
    "checkpoint": (
        lambda: timm_folder(model_args={"checkpoint_path": "folder/evil.pth"}), "checkpoint_path is not supported"
    ),
    "pretrained": (lambda: timm_folder(model_args={"pretrained": True}), "asks for weights from elsewhere"),
    "file in the configuration": (
        lambda: timm_folder(model_args={"pretrained_cfg": {"file": "folder/evil.pth"}}), "pretrained_cfg is not"
    ),
    "weights of another model": (timm_folder, "does not fit the architecture"),
    "layers": (
        lambda: timm_folder(architecture="vit_tiny_patch16_224", model_args={"depth": 10**9}), "more than 1,000"
    ),
    "unknown argument": (lambda: timm_folder(model_args={"speed": 3}), "unexpected keyword"),
    "list of arguments": (lambda: timm_folder(model_args=[1]), "expected mappings"),
}  # fmt: skip


@contextmanager
def limited_memory():
    """Let allocations fail that need much more memory than the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def check(folder, model, message, **options):
    with limited_memory(), pytest.raises(AtollError, match=message) as error:
        load_source(model, **options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("build", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_hostile_weights(folder, build, message):
    check(folder, "net.py:build", message, **build())


@pytest.mark.parametrize(("build", "message"), MODELS.values(), ids=MODELS)
def test_hostile_models(folder, build, message):
    check(folder, build(), message)


@needs_timm
@pytest.mark.parametrize(("build", "message"), TIMM.values(), ids=TIMM)
def test_hostile_models_of_timm(folder, build, message):
    check(folder, build(), message)


@needs_timm
@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "cache_dir"])
def test_options_of_timm_that_name_files(folder, option):
    check(folder, "timm:resnet10t", f"the option {option} is not supported", arguments={option: "evil.pth"})
