"""Commands that need more memory than there is: one sentence, no traceback, and nothing half written."""

import resource

import pytest

from atoll.cli import main
from atoll.runs.train import train
from support import SMALL, fork

pytestmark = pytest.mark.slow
MEMORY = "use a smaller batch size, model or data set, or a machine with more memory"


def run_with(megabytes, words, folder):
    """Run a command in a process that can allocate so much more memory than this one; exit code and standard error."""

    def task():
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)
        return main(words)

    process = fork(task, folder / "errors")
    process.join(200)
    return process.exitcode, " ".join((folder / "errors").read_text().split())


def files(run):
    """All files of a run except results and progress."""
    return sorted(path for path in run.rglob("*") if "results" not in path.parts)


@pytest.fixture(scope="module")
def wide_run(tmp_path_factory):
    words = ["model.widths=[1024,1024]", "trainer.epochs=0", "trainer.test_steps=0", "trainer.validation_steps=0"]
    return train(SMALL[0], "data.limit=32", "batch_size=32", *words, out=tmp_path_factory.mktemp("wide") / "run").folder


@pytest.mark.parametrize("megabytes", [8, 32, 64])
def test_attacks_without_enough_memory_are_refused(megabytes, wide_run, tmp_path):
    words = ["attack", str(wide_run), "--attacks", "PGD-2", "--batch-size", "360", "--restart"]
    before = files(wide_run)
    code, error = run_with(megabytes, words, tmp_path)
    assert code == 1
    assert "not enough memory" in error
    assert MEMORY in error
    assert "Traceback" not in error
    assert files(wide_run) == before


@pytest.mark.parametrize(
    "words",
    [
        ["model.widths=[30000,30000]"],
        ["data=TwoMoons", "data.n=10000000", "model=MLP"],
        ["model.widths=[512,512]", "model.hidden=60000"],
    ],
    ids=" ".join,
)
def test_training_without_enough_memory_is_refused(words, tmp_path):
    small = [SMALL[0], "trainer.batch_size=32"]
    code, error = run_with(200, ["train", *small, *words, "--out", str(tmp_path / "run")], tmp_path)
    assert code == 1
    assert "not enough memory" in error
    assert "Traceback" not in error
