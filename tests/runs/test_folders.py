"""Folders of runs, and whether something in them has changed."""

import os

import pytest

from atoll.errors import InputError
from atoll.runs.folders import folder_state, run_folders


def test_runs_are_listed_in_alphabetical_order(tmp_path):
    for name in ("b", "a/z", "a/c", "no run"):
        (tmp_path / name).mkdir(parents=True)
        if name != "no run":
            (tmp_path / name / "recipe.yaml").write_text("")
    assert run_folders(tmp_path) == [tmp_path / "a/c", tmp_path / "a/z", tmp_path / "b"]
    assert run_folders(str(tmp_path / "b")) == [tmp_path / "b"]
    with pytest.raises(InputError, match="nothing: no such folder"):
        run_folders(tmp_path / "nothing")


def test_every_change_of_a_folder_changes_its_state(tmp_path):
    run = tmp_path / "run"
    (run / "results").mkdir(parents=True)
    (run / "recipe.yaml").write_text("one")

    clock = (run / "recipe.yaml").stat().st_mtime_ns
    states = [folder_state(run)]
    assert folder_state(run) == states[0]

    def rewrite(text, time):
        (run / "recipe.yaml").write_text(text)
        os.utime(run / "recipe.yaml", ns=(0, time))

    for happen in (
        lambda: rewrite("four", clock),  # only the size differs
        lambda: rewrite("five", clock + 1),  # only the time differs
        lambda: (run / "results" / "a").mkdir(),
        lambda: (run / "results" / "a").rename(run / "results" / "b"),
        lambda: (run / "results" / "b" / "result.json").write_text(""),
        lambda: (run / "link").symlink_to(tmp_path / "nothing"),
        lambda: (tmp_path / "nothing").write_text("now it is something"),
    ):
        happen()
        states.append(folder_state(run))
    assert len({*states}) == len(states)


def test_the_state_does_not_depend_on_the_order_in_which_files_were_made(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for name in ("a", "b"):
        (run / name).mkdir(parents=True)
        (run / f"{name}.json").write_text("")
    state, walk = folder_state(run), os.walk

    def reverse(folder):
        for place, folders, names in walk(folder):
            folders.reverse()
            yield place, folders, names[::-1]

    monkeypatch.setattr(os, "walk", reverse)
    assert folder_state(run) == state
