"""Models from elsewhere become complete runs, or nothing is written."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.data import Digits
from atoll.data.fingerprint import Fingerprint
from atoll.errors import AtollError, RecipeError
from atoll.files import read_record
from atoll.runs.adopted import store_run
from atoll.runs.data_record import DataRecord
from atoll.runs.run import open_run


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def store(out, **options):
    sections = {"data": "Digits", "threat": {"norm": "linf", "eps": 0.1}}
    return store_run(net(), Digits(), out, sections=sections, origin={"source": "here"}, **options)


def test_a_stored_model_is_a_finished_run(tmp_path):
    (tmp_path / "run").mkdir()  # an empty folder is fine
    run = store(tmp_path / "run")
    assert run == open_run(tmp_path / "run")
    x = run.data.tensors("test", 5)[0]
    assert torch.equal(run.model()(x), net()(x))
    assert run.index == {"finished": True, "last": 0, "best": {"raw": 0}}
    assert run.is_finished
    assert (run.threat.norm, run.threat.eps, run.threat.bounds) == ("linf", 0.1, (0.0, 1.0))
    assert DataRecord.load(run.folder) == DataRecord.of(Digits())
    assert read_record(run.folder / "adopted.json", "an adopted model") == {"source": "here"}
    assert read_record(run.folder / "environment.json", "an environment")["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_data_is_not_read_again(tmp_path, monkeypatch):
    record = DataRecord(Fingerprint({"test": 3}, {"test": "0"}), tmp_path, 7, ("a", "b"))
    monkeypatch.setattr(Digits, "inspect", lambda *_: pytest.fail("this takes minutes"))
    store(tmp_path / "new" / "run", record=record)
    assert DataRecord.load(tmp_path / "new" / "run") == record


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(RecipeError, match=f"{name} already exists; choose another folder"):
            store(tmp_path / name)
    assert [path.read_text() for path in tmp_path.rglob("file") if path.is_file()] == ["mine", "mine"]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(AtollError, match="No space left on device; "):
        store(tmp_path / "run")
    assert not list(tmp_path.iterdir())
