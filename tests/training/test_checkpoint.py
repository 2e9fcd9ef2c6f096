"""Checkpoints: complete or absent, verified, and harmless to open."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.errors import AtollError, CheckpointError
from atoll.files import json_digest
from atoll.runs.run import open_run
from atoll.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    load_checkpoint,
    load_weights,
    pack,
    save_checkpoint,
    unpack,
)
from support import tiny_trainer

plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    plain | st.integers(0, 9).map(lambda n: torch.arange(n)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers(0, 99) | st.text("abcxyz_", min_size=1, max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(tree=trees)
def test_pack_is_undone_by_unpack_through_json(tree):
    tensors = {}
    text = json.dumps(pack(tree, tensors))
    assert same(unpack(json.loads(text), tensors), tree)


@pytest.fixture
def checkpoint():
    optimizer_state = {"state": {0: {"step": torch.tensor(3.0), "buffer": torch.randn(2, 3)}}, "lr": 1e-3}
    return Checkpoint({"w": torch.randn(2, 3), "b": torch.zeros(())}, {"optimizer": optimizer_state}, {"name": "x"})


def test_round_trip_keeps_every_bit(tmp_path, checkpoint):
    save_checkpoint(tmp_path / "00000001", checkpoint)
    loaded = load_checkpoint(tmp_path / "00000001")
    assert same(dict(loaded.model), checkpoint.model)
    assert same(loaded.training, checkpoint.training)
    assert loaded.about == {"name": "x"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001"]  # nothing temporary is left


def test_nonfinite_numbers_survive(tmp_path):
    save_checkpoint(tmp_path / "1", Checkpoint({}, {"best": -math.inf}))
    assert load_checkpoint(tmp_path / "1").training["best"] == -math.inf


def test_only_plain_data_is_accepted():
    with pytest.raises(TypeError, match="cannot store a function in a checkpoint"):
        pack({"f": lambda: None}, {})


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_detected_and_the_one_before_is_used(tmp_path, checkpoint, name, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, checkpoint)
    checkpoints.save(2, checkpoint)
    file = checkpoints.path(2) / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint(checkpoints.path(2))
    loaded, faults = checkpoints.newest()
    assert same(dict(loaded.model), checkpoint.model)
    assert len(faults) == 1
    assert "00000002" in faults[0]


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(tmp_path, checkpoint):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    checkpoints.save(1, checkpoint)
    (checkpoints.path(1) / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        checkpoints.newest()


def test_old_ones_go_and_protected_ones_stay(tmp_path, checkpoint):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, checkpoint, protect={2})
    assert checkpoints.steps() == [2, 5, 6]


def test_a_file_full_of_pickle_is_not_opened(tmp_path, checkpoint):
    """Replacing a file by a pickle that would run code gives an error, and nothing runs."""
    import pickle

    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    save_checkpoint(tmp_path / "1", checkpoint)
    bomb = pickle.dumps(Hostile())
    (tmp_path / "1" / "model.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "1")
    # Even with a digest that fits.
    record = json.loads((tmp_path / "1" / "checkpoint.json").read_text())
    import hashlib

    record["files"]["model"] = hashlib.sha256(bomb).hexdigest()
    record.pop("digest")
    record["digest"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (tmp_path / "1" / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "1")
    assert not marker.exists()


FULL_DISK = """
import sys, signal, resource, torch
from pathlib import Path
from atoll.errors import AtollError, CheckpointError
from atoll.files import json_digest
from atoll.runs.run import open_run
from atoll.training.checkpoint import *
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder)
checkpoints.save(1, Checkpoint({"w": torch.zeros(10)}))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoints.save(2, Checkpoint({"w": torch.zeros(100_000)}))
except CheckpointError as error:
    print(error)
    print(checkpoints.steps(), sorted(p.name for p in folder.iterdir()))
"""


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    """A file-size limit makes writes fail the way a full disk does, in the middle of a file."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cannot write the checkpoint" in out
    assert "earlier checkpoints are intact" in out
    assert "[1] ['00000001']" in out


def test_another_architecture_is_refused_whole():
    model, other = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3))
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"not fit the architecture of this Linear \(missing: bias, weight; unexp"
    ):
        load_weights(model, other.state_dict())
    with pytest.raises(CheckpointError, match=r"different shapes: bias \(4,\) instead of \(3,\), weight"):
        load_weights(model, nn.Linear(2, 4).state_dict())
    assert torch.equal(model.weight, before)


def test_a_digest_covers_everything(tmp_path, checkpoint):
    digests = set()
    changes = {"about": {"name": "y"}, "training": {}, "model": {"w": torch.zeros(2)}, "averages": {"swa": {}}}
    for number, change in enumerate([{}, *({name: value} for name, value in changes.items())]):
        save_checkpoint(tmp_path / str(number), dataclasses.replace(checkpoint, **change))
        digests.add(load_checkpoint(tmp_path / str(number)).digest)
    assert len(digests) == 5
    save_checkpoint(tmp_path / "again", checkpoint)
    assert load_checkpoint(tmp_path / "again").digest in digests


def test_an_interrupted_write_leaves_only_hidden_files(tmp_path, checkpoint, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, checkpoint)
    # What a kill between writing and renaming leaves behind:
    shutil.copytree(checkpoints.path(1), tmp_path / ".00000002.123.tmp")
    (tmp_path / ".00000002.123.tmp" / "checkpoint.json").unlink()
    assert checkpoints.steps() == [1]
    assert checkpoints.newest() is not None


def signed(folder, **entries):
    """Change entries of a checkpoint's record, with a digest that matches; None removes one."""
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text()) | entries
    record = {name: value for name, value in record.items() if value is not None and name != "digest"}
    path.write_text(json.dumps({**record, "digest": json_digest(record)}))


WRONG = {
    "no files": {"files": None},
    "files": {"files": [1]},
    "no model": {"files": {"training": "0"}},
    "path": {"files": {"../model": "0", "model": "0", "training": "0"}},
    "digest": {"files": {"model": 1, "training": "0"}},
    "no about": {"about": None},
    "about": {"about": "x"},
    "no training": {"training": None},
    "tensor": {"training": {"a": {"$tensor": "/none"}}},
    "tensor name": {"training": {"a": {"$tensor": ["x"]}}},
    "number": {"training": {"#x": 1}},
    "format": {"format": [1]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_other_entries_is_one_sentence(tmp_path, checkpoint, name):
    save_checkpoint(tmp_path / "1", checkpoint)
    signed(tmp_path / "1", **WRONG[name])
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{tmp_path / '1'}"):
        load_checkpoint(tmp_path / "1")


STATE = {
    "empty": {},
    "methods": {"methods": 3},
    "no position": {"methods": []},
    "position": {"position": {"epoch": "one", "batch": 0, "step": 0}},
    "float": {"position": {"epoch": 1.5, "batch": 0, "step": 0}},
    "best": {"best": {"raw": [1]}},
    "score": {"best": {"raw": {"score": "x", "step": 1, "epoch": 1}}},
    "sums": {"sums": {"loss": 3}},
    "optimizer": {"optimizer": {"state": 1, "param_groups": 2}},
    "negative": {"position": {"epoch": -(10**9), "batch": 0, "step": 0}},
}


@pytest.mark.parametrize("name", STATE)
def test_a_state_that_does_not_fit_is_one_sentence(tmp_path, name):
    tiny_trainer(folder=tmp_path, epochs=1).fit()
    folder = Checkpoints(tmp_path / "checkpoints").path(Checkpoints(tmp_path / "checkpoints").steps()[-1])
    training = json.loads((folder / "checkpoint.json").read_text())["training"]
    signed(folder, training={**training, **STATE[name]} if name not in ("empty", "no position") else STATE[name])
    with pytest.raises(CheckpointError, match="start again in another folder"):
        tiny_trainer(folder=tmp_path, epochs=1).fit(resume=True)


OPTIMIZER = {
    "momentum is no tensor": lambda tree: tree["state"]["#0"].update(momentum_buffer=0),
    "momentum of another shape": lambda tree: tree["state"]["#0"].update(tree["state"]["#1"]),
    "learning rate": lambda tree: tree["param_groups"][0].update(lr="much"),
    "fused": lambda tree: tree["param_groups"][0].update(fused="yes"),
    "no groups": lambda tree: tree.update(param_groups=[]),
    "no parameters": lambda tree: tree["param_groups"][0].update(params=[]),
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_a_state_of_the_optimizer_that_does_not_fit_is_one_sentence(tmp_path, name):
    tiny_trainer(folder=tmp_path, epochs=1).fit()
    folder = Checkpoints(tmp_path / "checkpoints").path(Checkpoints(tmp_path / "checkpoints").steps()[-1])
    training = json.loads((folder / "checkpoint.json").read_text())["training"]
    OPTIMIZER[name](training["optimizer"])
    signed(folder, training=training)
    with pytest.raises(CheckpointError, match="start again in another folder"):
        tiny_trainer(folder=tmp_path, epochs=1).fit(resume=True)


ABOUT = {
    "recipe": {"recipe": 3},
    "model": {"recipe": {"model": "SmallConvNet"}},
    "shape": {"input_shape": "1x8x8"},
    "negative": {"input_shape": [1, -8, 8]},
    "classes": {"num_classes": None},
    "many classes": {"num_classes": 10**30},
    "bounds": {"bounds": [0]},
    "step": {"epoch": "one"},
}


@pytest.mark.parametrize("name", ABOUT)
def test_a_description_that_does_not_fit_is_one_sentence(trained, tmp_path, name):
    run = open_run(shutil.copytree(trained, tmp_path / "run"))
    folder = run.checkpoint_path()
    about = json.loads((folder / "checkpoint.json").read_text())["about"]
    signed(folder, about={**about, **ABOUT[name]})
    with pytest.raises(AtollError, match=rf"^[^\n]*({folder}|num_classes: expected at most)"):
        run.model()
