"""Names mean the same in recipes, on the command line and in Python."""

import pytest

from atoll.attacks.base import ATTACKS
from atoll.attacks.suites import get_attack
from atoll.errors import InputError
from atoll.losses import LOSSES
from atoll.registry import REGISTRIES, Registry, class_path, load_file, registry, registry_of, suggest
from atoll.runs.recipe import build_recipe
from atoll.threat import ThreatModel

LOSS = """
from atoll.losses import Loss
from atoll.losses.terms import CrossEntropy

class Mine(Loss):
    "A loss of somebody else's."

    objective = "ce"

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__(ce=(weight, CrossEntropy("adversarial")))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_loss.py"
    path.write_text(LOSS)
    return path


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_listed_name_resolves_to_a_class_of_its_kind(kind):
    table = registry(kind)
    for name, member in table.members().items():
        assert issubclass(member.cls, table.base_class)
        assert table.resolve(name).cls is member.cls
        assert table.resolve(name.swapcase()).cls is member.cls
        assert table.resolve(member.path, trust=False).cls is member.cls


def test_no_two_registered_classes_share_a_name():
    names: dict[str, str] = {}
    for kind in REGISTRIES:
        for member in registry(kind).members().values():
            assert names.setdefault(member.cls.__name__, member.path) == member.path


@pytest.mark.parametrize("name", ["PGD-7", "pgd-7", "CW-3"])
def test_numbered_names_take_any_number(name):
    attack = get_attack(name, ThreatModel("linf", "8/255"))
    assert attack.steps == int(name[-1])
    assert attack.step_size == pytest.approx(2 / 255)


@pytest.mark.parametrize("name", ["PGD-", "PGD-0", "PGD--1", "PGD-1.5", "PGD-9999999", "", "-", 3, None, ["PGD"]])
def test_nonsense_is_refused_in_one_sentence(name):
    with pytest.raises(InputError, match="expected"):
        ATTACKS.resolve(name)


def test_a_wrong_name_gets_the_closest_ones():
    with pytest.raises(InputError, match="did you mean TRADES"):
        LOSSES.resolve("TRDAES")
    assert "expected one of" in suggest("zzzz", LOSSES.members())


def test_a_file_works_like_a_name(file):
    member = LOSSES.resolve(f"{file}:Mine")
    assert member.cls is LOSSES.resolve(f"{file}:Mine").cls  # loaded once
    assert class_path(member.cls) == f"{file}:Mine"
    recipe = build_recipe("digits-at", f"loss={file}:Mine", "loss.weight=2")
    assert type(recipe.loss) is member.cls
    assert recipe.tree["loss"] == {"class_path": f"{file}:Mine", "init_args": {"weight": 2}}
    assert type(build_recipe(recipe.tree).loss) is member.cls


def test_a_stored_file_needs_trust(file):
    with pytest.raises(InputError, match="--trust"):
        LOSSES.resolve(f"{file}:Mine", trust=False)
    with pytest.raises(InputError, match="--trust"):
        LOSSES.resolve("my_package.Mine", trust=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{folder}/none.py:Mine", "there is no Python file"),
        ("{file}:Other", "cannot import"),
        ("{file}:CrossEntropy", "expected a subclass"),
        ("{folder}/broken.py:Mine", "cannot import"),
        ("os.system", "expected a subclass"),
        ("no.such.module.Mine", "cannot import"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_one_sentence(file, name, reason):
    (file.parent / "broken.py").write_text("def (")
    with pytest.raises(InputError, match=reason):
        LOSSES.resolve(name.format(file=file, folder=file.parent))


def test_a_failing_file_leaves_nothing_behind(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text("raise ValueError('no')")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            load_file(path)


def test_a_name_is_registered_once():
    table = Registry("thing", "things", "builtins.object", "atoll.errors")
    table.add("a", int)
    table.add("a", int)
    with pytest.raises(InputError, match="taken"):
        table.add("a", str)


def test_hints_lead_to_their_registry():
    from torch.optim import Optimizer

    from atoll.losses import AT, Loss

    assert registry_of(Loss) is LOSSES
    assert registry_of(AT) is None
    assert registry_of(Optimizer) is registry("optimizer")
    assert registry_of(int) is None


def test_classes_that_moved_are_found_under_their_old_names():
    assert LOSSES.resolve("atoll.training.losses.trades.TRADES", trust=False).cls.__name__ == "TRADES"
