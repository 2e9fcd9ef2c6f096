"""Recipes: everything is checked before anything starts, and all faults come at once."""

import shutil

import pytest
import torch
import yaml

from atoll.cli import main
from atoll.errors import AtollError, CheckpointError, InputError, RecipeError
from atoll.registry import REGISTRIES, registry
from atoll.runs.recipe import (
    build_recipe,
    expand_overrides,
    full_key,
    read_recipe,
    read_recipe_file,
    recipe_keys,
    recipes,
    variants,
    write_recipe,
)
from atoll.runs.run import open_run
from atoll.runs.train import build_model, build_trainer, train

MINIMAL = {"data": "Digits", "model": "MLP"}


@pytest.mark.parametrize("name", recipes())
def test_every_shipped_recipe_survives_its_own_dump(name):
    assert recipes()[name], "the first line of a recipe says what it is"
    recipe = build_recipe(next(iter(variants(name))))
    again = build_recipe(yaml.safe_load(yaml.safe_dump(dict(recipe.tree))))
    assert again.tree == recipe.tree


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])  # of 7 rows, one, but all their options
@pytest.mark.parametrize("name", recipes())
def test_every_row_is_valid(name, step):
    for row in list(variants(name))[::step]:
        assert build_recipe(row).tree


def test_rows_of_a_book_are_the_papers_settings():
    """A few cells of TrH's tables 5 and 6 and RAT's section 5, looked up by hand."""
    trh = build_recipe("trh-cifar/cifar100-vit_l16-at-trh").methods[0]
    assert (trh.lambda_, trh.schedule, trh.gamma) == (0.01, "multistep", 0.001)
    trh = build_recipe("trh-cifar/cifar100-vit_l16-trades-trh").methods[0]
    assert (trh.lambda_, trh.schedule) == (1e-4, "constant")
    trh = build_recipe("trh-cifar/cifar10-hybrid_l16-at-trh").methods[0]
    assert (trh.lambda_, trh.schedule) == (5e-4, "multistep")
    assert build_recipe("trh-cifar/cifar100-vit_l16-trades-awp").methods[0].gamma == 0.0001
    assert build_recipe("trh-cifar/cifar10-vit_l16-trades-s2o").methods[0].weight == 0.3
    expected = {  # lambda and schedule of table 6: (AT, TRADES) for B16 and L16, linf and l2
        "linf-vit_b16-at": (1e-4, "multistep"),
        "l2-vit_b16-at": (5e-5, "linear"),
        "linf-vit_b16-trades": (5e-5, "linear"),
        "l2-vit_b16-trades": (5e-5, "linear"),
        "linf-vit_l16-at": (5e-4, "multistep"),
        "l2-vit_l16-at": (5e-4, "linear"),
        "linf-vit_l16-trades": (5e-4, "multistep"),
        "l2-vit_l16-trades": (5e-5, "multistep"),
    }
    for row, values in expected.items():
        trh = build_recipe(f"trh-imagenet/{row}-trh").methods[0]
        assert (trh.lambda_, trh.schedule) == values, row
    gloro = build_recipe("gloro/tiny-l6w128")
    assert gloro.threat.radius == 36 / 255
    assert (gloro.trainer.epochs, gloro.trainer.batch_size, gloro.schedule.warmup) == (800, 256, 20)
    assert [round(gloro.methods[0].factor(epoch, 800), 6) for epoch in (0, 200, 400, 800)] == [0.1, 1.05, 2.0, 2.0]
    gloro = build_recipe("mnist-gloro")
    assert gloro.loss.terms["abstain"][0] == 1.5
    assert round(gloro.threat.radius * gloro.methods[0].factor(150, 300), 2) == 1.74
    assert [round(1e-3 * gloro.schedule(epoch, 300), 9) for epoch in (150, 225, 300)] == [1e-3, 3.1623e-05, 1e-6]
    rat = build_recipe("rat/svhn-preact18-l2-awp-both")
    assert [type(m).__name__ for m in rat.methods] == ["RAT", "AWP"]
    assert rat.methods[0].eta == 0.2
    assert rat.threat.radius == 128 / 255


def test_books_and_rows_that_do_not_exist():
    with pytest.raises(RecipeError, match=r"rat is a grid of recipes; name one of its variants, such as rat/cifar10"):
        build_recipe("rat")
    with pytest.raises(RecipeError, match=r"moons-trh has no variant 'tap'; did you mean top\?"):
        build_recipe("moons-trh/tap")


def test_all_faults_come_at_once_each_with_what_was_expected_and_got():
    with pytest.raises(RecipeError) as info:
        build_recipe(
            {
                "dta": "Digits",
                "model": {"class_path": "MLP", "init_args": {"hiden": [8], "input_range": "[0,255]"}},
                "loss": "TRADS",
                "threat": {"eps": -1, "norm": "linf"},
                "attack": {"class_path": "PGD", "init_args": {"steps": "many"}},
                "methods": [{"class_path": "Lookahead", "init_args": {"k": 0}}, "Nothing"],
                "optimizer": {"class_path": "SGD", "init_args": {"lr": "fast"}},
                "trainer": {"epochs": 1.5, "batch_sise": 3},
            }
        )
    text = str(info.value)
    for fault in (
        "dta: unknown section; did you mean data?",
        "data: this section is required",
        "model.hiden: MLP has no such argument; did you mean hidden?",
        "model.input_range: expected one of [0,1], [-1,1], centered, got '[0,255]'",
        "loss.class_path: expected a loss, got 'TRADS'; did you mean TRADES or GloRoTRADES?",
        "threat: eps: expected a finite number >= 0, got -1",
        "attack.steps: expected an integer, got 'many'",
        "methods[0]: k: expected at least 1",
        "methods[1].class_path: expected a method, got",
        "optimizer.lr: expected a number or Tensor, got 'fast'",
        "trainer.epochs: expected an integer, got 1.5",
        "trainer.batch_sise: TrainerSettings has no such argument; did you mean batch_size?",
    ):
        assert fault in text, fault


def test_overrides():
    recipe = build_recipe(
        "digits-at",
        "loss=TRADES",
        "loss.lambda_t=3",
        "model.widths=[4, 8]",
        "model.init_args.hidden=16",
        "threat.eps=8/255",
        "optimizer.class_path=AdamW",
        "optimizer.lr=1e-3",
        "methods=[Lookahead]",
        "methods.0.k=7",
        "trainer.epochs=2",
        "seed=5",
    )
    assert type(recipe.loss).__name__ == "TRADES"
    assert recipe.loss.terms["kl"][0] == 3
    assert recipe.threat.radius == 8 / 255
    assert recipe.methods[0].k == 7
    assert recipe.seed == 5
    optimizer = recipe.optimizer(build_model(recipe).parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 1e-3


def test_sections_that_a_recipe_leaves_out_have_documented_defaults():
    tree = build_recipe(MINIMAL).tree
    sgd, attack = tree["optimizer"]["init_args"], tree["attack"]
    assert (tree["pretrained"], tree["methods"], tree["seed"]) == (None, [], 0)
    assert (tree["loss"]["class_path"], tree["loss"]["init_args"]) == ("atoll.losses.robust.Standard", {})
    assert (attack["class_path"].rpartition(".")[2], attack["init_args"]["steps"]) == ("PGD", 10)
    assert tree["optimizer"]["class_path"] == "torch.optim.sgd.SGD"
    assert (sgd["lr"], sgd["momentum"], sgd["weight_decay"]) == (0.1, 0.9, 0.0005)
    assert tree["schedule"]["class_path"].rpartition(".")[2] == "Piecewise"


def test_an_override_keeps_the_other_defaults_of_its_section():
    tree = build_recipe(MINIMAL, "lr=0.05", "attack.steps=3", "eps=0.25").tree
    assert tree["attack"]["init_args"]["steps"] == 3
    assert (tree["optimizer"]["init_args"]["lr"], tree["optimizer"]["init_args"]["momentum"]) == (0.05, 0.9)
    assert tree["threat"] == {"norm": build_recipe(MINIMAL).tree["threat"]["norm"], "eps": 0.25}


def test_at_most_twenty_errors_are_listed():
    for count, more in ((20, ""), (21, "and 1 more"), (25, "and 5 more")):
        with pytest.raises(RecipeError) as error:
            build_recipe({**MINIMAL, **{f"x{i:02d}": 1 for i in range(count)}})
        first, *lines = str(error.value).splitlines()
        assert first == f"recipe has {count} error(s):"
        assert len(lines) == 20 + bool(more)
        assert lines[19].strip().startswith("x19: unknown section")
        assert lines[20:] == [f"  {more}"] * bool(more)


ONE = [  # a single mistake and its message; what depends on the faulty part is not checked
    ("data=Digitz", "data.class_path: expected a data set, got 'Digitz'"),
    ("model=MPL", "model.class_path: expected a model, got 'MPL'"),
    ("loss=TRADS", "loss.class_path: expected a loss, got 'TRADS'"),
    ("threat.eps=-1", "threat: eps: expected a finite number >= 0, got -1"),
    ("threat={norm: l0, eps: 2}", "threat.norm: expected linf, l2 or l1 for training, got l0"),
    ("threat.eps=1e10", "threat: eps"),
    ("attack=PDG", "attack.class_path: expected an attack, got 'PDG'"),
    ("methods=[AWPP]", "methods[0].class_path: expected a method, got 'AWPP'"),
    ("methods=[AWP, SWA, AWP]", "methods: expected each method once, got AWP 2 times"),
    ("optimizer=SDG", "optimizer.class_path: expected an optimizer, got 'SDG'"),
    ("optimizer.momentum=-1", "optimizer: Invalid momentum value: -1"),
    ("schedule=Cosin", "schedule.class_path: expected a schedule, got 'Cosin'"),
    ("schedule={class_path: Cosine, init_args: {warmup: 100}}", "schedule: "),
    ("trainer.epochs=-1", "trainer: epochs: expected at least 0, got -1"),
    ("seed=9223372036854775808", "seed: expected at most"),
]


def test_an_attack_that_does_not_suit_the_loss_names_both():
    message = r"attack: objective: kl has zero gradient at the clean point.* \(what TRADES maximizes\)$"
    with pytest.raises(RecipeError, match=message):
        build_recipe({**MINIMAL, "loss": "TRADES", "attack": "FGSM"})
    with pytest.raises(RecipeError, match=r"attack: PDPGD: expected l1, got linf$"):
        build_recipe({**MINIMAL, "loss": "AT", "attack": "PDPGD"})
    assert build_recipe({**MINIMAL, "loss": "Standard", "attack": "PDPGD"}).attack  # it is never used


@pytest.mark.parametrize(("override", "sentence"), ONE)
def test_one_mistake_is_one_error(override, sentence):
    with pytest.raises(RecipeError) as error:
        build_recipe({**MINIMAL, "loss": "AT"}, override)
    first, *lines = str(error.value).splitlines()
    assert first == "recipe has 1 error(s):"
    assert len(lines) == 1
    assert lines[0].strip().startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["epochs"], "expected key.sub=value, got 'epochs'"),
        (["=5"], "expected key.sub=value, got '=5'"),
        (["methods.3.k=1"], "methods.3.k: expected an index below 0 at methods.3, got '3'"),
        (["methods.3.k.x=1"], "methods.3.k.x: expected an index below 0 at methods.3, got '3'"),
        (["methods=[Lookahead]", "methods.1.k=1"], "methods.1.k: expected an index below 1 at methods.1, got '1'"),
        (["methods=[Lookahead]", "methods.x=AWP"], "methods.x: expected an index below 1, got 'x'"),
        (["model.widths.2=1"], "model.widths.2: expected an index below 2, got '2'"),
        (["seed.x=1"], "seed.x: 0 has no part 'x'"),
        (["threat.bounds=null"], "threat.bounds: the data set determines the bounds of inputs"),
        (["model.bounds=null"], "model.bounds: the data set determines the bounds of inputs"),
        (["data=[1"], "not valid YAML"),
        (["model.foo.bar=1"], "SmallConvNet has no such argument"),
    ],
)
def test_bad_overrides(overrides, sentence):
    with pytest.raises(RecipeError, match=sentence):
        build_recipe("digits-at", *overrides)


def test_files_and_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    assert build_recipe(file).tree == build_recipe(MINIMAL).tree
    with pytest.raises(RecipeError, match=r"no recipe 'digits-ta'; did you mean digits-at"):
        build_recipe("digits-ta")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*: No such file"):
        build_recipe(tmp_path / "none.yaml")
    file.write_text("- a\n- b\n")
    with pytest.raises(RecipeError, match="expected a mapping of sections, got list"):
        build_recipe(file)
    file.write_text("data: !!python/object/apply:os.system ['touch hacked']\n")
    with pytest.raises(RecipeError, match="not valid YAML"):
        build_recipe(file)


def test_reading_does_not_change_what_was_given():
    tree = {"data": {"class_path": "Digits"}, "model": "MLP"}
    read_recipe(tree, ["data.validation=0.2"])
    assert tree == {"data": {"class_path": "Digits"}, "model": "MLP"}


def test_classes_from_elsewhere_are_for_recipes_not_for_checkpoints():
    assert registry("loss").resolve("atoll.losses.robust.AT", trust=False).cls.__name__ == "AT"
    assert registry("data").resolve("support.TinyData").cls.__name__ == "TinyData"
    with pytest.raises(InputError, match="pass --trust if you trust its author"):
        registry("data").resolve("support.TinyData", trust=False)
    with pytest.raises(InputError, match=r"expected a subclass of atoll.models.base.Classifier, got os.system"):
        registry("model").resolve("os.system")
    with pytest.raises(InputError, match=r"cannot import 'no.such.Thing'"):
        registry("model").resolve("no.such.Thing")


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_member_of_every_kind_has_a_line_of_its_own(kind):
    assert registry(kind).members()
    if kind != "optimizer":
        assert not [name for name, member in registry(kind).members().items() if not member.summary]


def test_the_model_depends_on_the_seed_and_not_on_the_global_generator():
    first = build_model(build_recipe(MINIMAL)).head.weight
    torch.rand(1)
    assert torch.equal(first, build_model(build_recipe(MINIMAL)).head.weight)
    assert not torch.equal(first, build_model(build_recipe(MINIMAL, "seed=1")).head.weight)


def test_options_that_a_class_passes_on_are_checked_too():
    """TwoMoons takes ``**options`` for the arguments all data sets have."""
    assert build_recipe({"data": "TwoMoons", "model": "MLP"}, "data.validation=0.3").data.validation_share == 0.3
    with pytest.raises(RecipeError, match=r"data.validation: expected a number, got 'x'\n.*data.limt: .* mean limit\?"):
        build_recipe({"data": "TwoMoons", "model": "MLP"}, "data.validation=x", "data.limt=3")


def test_bounds_come_from_the_data():
    trainer = build_trainer(build_recipe({"data": "TwoMoons", "model": "MLP"}))
    assert trainer.threat.bounds is None
    assert trainer.model.bounds is None


SHORT = [  # recipe, short form, and the key that it stands for
    ("digits-at", "epochs", "trainer.epochs"),
    ("digits-at", "batch_size", "trainer.batch_size"),
    ("digits-at", "lr", "optimizer.lr"),
    ("digits-at", "eps", "threat.eps"),
    ("digits-gloro", "eps", "threat.eps"),  # although Adam has an eps
    ("digits-at", "steps", "attack.steps"),
    ("digits-at", "limit", "data.limit"),
    ("digits-at", "widths", "model.widths"),
    ("digits-trades", "lambda_t", "loss.lambda_t"),
    ("digits-flat/at-awp", "gamma", "methods.0.gamma"),
    ("digits-at", "seed", "seed"),  # sections keep their names
    ("digits-at", "loss", "loss"),
    ("digits-at", "trainer.epochs", "trainer.epochs"),
    ("digits-at", "nothing.like.it", "nothing.like.it"),  # refused when the recipe is built
]


@pytest.mark.parametrize(("recipe", "short", "key"), SHORT)
def test_short_forms(recipe, short, key):
    assert full_key(read_recipe(recipe), short) == key


@pytest.mark.parametrize("name", ["digits-at", "digits-gloro", "digits-flat/at-trh", "canvas/at-large"])
def test_short_forms_of_everything_in_a_recipe(name):
    """A short form stands for the only key that ends in it, or the error names all of them."""
    tree = build_recipe(name).tree
    parts = {f"methods.{i}": part for i, part in enumerate(tree["methods"])}
    parts |= {section: part for section, part in tree.items() if isinstance(part, dict)}
    keys = [f"{path}.{argument}" for path, part in parts.items() for argument in part.get("init_args", part)]
    for short in {key.rpartition(".")[2] for key in keys} - tree.keys():
        candidates = [key for key in keys if key.rpartition(".")[2] == short]
        candidates = [key for key in candidates if key.startswith(("trainer.", "threat."))] or candidates
        if len(candidates) == 1:
            assert full_key(tree, short) == candidates[0]
        else:
            with pytest.raises(RecipeError, match=f"{short}: ambiguous; write ") as error:
                full_key(tree, short)
            assert all(key in str(error.value) for key in candidates)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["methods=[AWP, AWPT]", "gamma=1"], "gamma: ambiguous; write methods.0.gamma or methods.1.gamma"),
        (["epoch=3"], "epoch: unknown key; did you mean trainer.epochs or trainer.keep_epochs?"),
        (["lambda_t=3"], "lambda_t: unknown key"),  # AT has none
        (["zzz=3"], "zzz: unknown key; expected the key of a section (data, model, pretrained, loss, threat"),
        (["optimiser=SGD"], "optimiser: unknown key; did you mean optimizer?"),
        (["loss=NoLoss", "lambda_t=3"], "lambda_t: unknown key"),
        (["epochs="], "epochs: expected a value, got none"),
    ],
)
def test_short_forms_that_stand_for_nothing_are_one_sentence(overrides, sentence):
    with pytest.raises(RecipeError) as error:
        build_recipe("digits-at", *overrides)
    assert str(error.value).startswith(sentence)


def test_short_forms_see_the_overrides_before_them():
    assert build_recipe("digits-at", "loss=TRADES", "lambda_t=3").tree["loss"]["init_args"]["lambda_t"] == 3
    assert expand_overrides("digits-at", ["loss=TRADES"], ["lambda_t=3"]) == ["loss.lambda_t=3"]


def test_short_forms_know_the_arguments_of_the_users_own_classes(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    tree = {**MINIMAL, "loss": f"{tmp_path}/mine.py:Mine"}
    assert full_key(tree, "sharpness") == "loss.sharpness"
    assert "loss.sharpness" in recipe_keys(tree)
    assert read_recipe(tree, ["sharpness=2"])["loss"]["init_args"] == {"sharpness": 2}
    assert expand_overrides(tree, ["sharpness=2"], ["sharpness=3"]) == ["loss.sharpness=3"]
    assert build_recipe(tree, "sharpness=2").loss.sharpness == 2
    for use in (full_key, lambda tree, key, trust: read_recipe(tree, [f"{key}=2"], trust=trust)):
        with pytest.raises(RecipeError, match="sharpness: unknown key"):
            use(tree, "sharpness", trust=False)
    assert "loss.sharpness" not in recipe_keys(tree, trust=False)


def test_short_forms_of_untrusted_recipes_import_nothing(tmp_path):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    tree = {**read_recipe("digits-at"), "loss": f"{tmp_path}/planted.py:Loss"}
    with pytest.raises(RecipeError, match="zzz: unknown key"):
        build_recipe(tree, "zzz=3", trust=False)


MINE = """
from atoll.losses import Standard

class Mine(Standard):
    "A loss."

    def __init__(self, *, sharpness: float = 1.0):
        super().__init__()
        self.sharpness = sharpness
"""


BOMB = ["a0: &a0 {x: 1, y: 2, z: 3}"]
BOMB += [f"a{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in range(9))}]" for i in range(1, 9)]
# What a file of a recipe may hold, and what is said about it.
UNREADABLE = {
    "not YAML": (b"data: [1, 2", "not valid YAML"),
    "no text": (b"data: \xff", "cannot be read"),
    "NUL": (b"data: \0", "not valid YAML"),
    "deep": (b"[" * 10**6, "nested too deeply"),
    "deep sequence": (b"- " * 10**5, "nested too deeply"),
    "deep mapping": (b"{a: " * 10**5, "nested too deeply"),
    "nested": (b"data: " + b"[" * 80 + b"]" * 80, "nested too deeply"),
    "anchors": ("\n".join(BOMB).encode(), "expected at most 100,000 values"),
    "itself": (b"own: &own {self: *own}", "nested too deeply"),
    "empty": (b"", "expected a mapping of sections"),
    "list": (b"[1]", "expected a mapping of sections"),
}


def test_a_recipe_has_at_most_100000_values(tmp_path):
    """Mappings and lists count as values; so do all the places that an anchor stands for."""
    part, parts = f"a: &a [{', '.join('0' * 98)}]", f"b: [{', '.join(['*a'] * 1009)}]"  # 99 and 1 + 1009 * 99 values
    for rest, allowed in ((7, True), (8, False)):  # and two for the recipe and the last list
        (tmp_path / "a.yaml").write_text(f"{part}\n{parts}\nc: [{', '.join('0' * rest)}]\n")
        if allowed:
            assert len(read_recipe_file(tmp_path / "a.yaml")["b"]) == 1009
        else:
            with pytest.raises(RecipeError, match=r"a\.yaml cannot be read: expected at most 100,000 values"):
                read_recipe_file(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_one_sentence(tmp_path, name):
    content, message = UNREADABLE[name]
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(CheckpointError, match=message):
        open_run(tmp_path)


def test_every_damage_of_a_written_recipe_is_noticed(tmp_path):
    path, tree = tmp_path / "recipe.yaml", {"data": "Digits", "seed": 1}
    write_recipe(path, tree)
    content = path.read_bytes()
    assert content.startswith(b"# sha256: ")
    assert read_recipe_file(path) == tree
    changed = [content[:end] for end in range(len(content))]
    changed += [
        content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        for place in range(len(content))
        for bit in range(8)
    ]
    for damaged in changed:
        path.write_bytes(damaged)
        try:
            assert read_recipe(path) == tree
        except RecipeError:
            continue


def test_an_edited_recipe_is_used_without_its_first_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    write_recipe(path, {"data": "Digits", "seed": 1})
    path.write_text(path.read_text().replace("seed: 1", "seed: 2"))
    with pytest.raises(RecipeError, match=r"damaged or edited: .* or delete its first line to accept the changes"):
        read_recipe(path)
    path.write_text(path.read_text().partition("\n")[2])
    assert read_recipe(path)["seed"] == 2


def test_a_link_out_of_the_run_shows_nothing_of_its_target(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("password: [hunter2")
    (tmp_path / "run" / "recipe.yaml").symlink_to(tmp_path / "secret")
    for resume in (
        lambda: open_run(tmp_path / "run"),
        lambda: train(None, out=tmp_path / "run", resume=True),
        lambda: train("digits-at", out=tmp_path / "run", resume=True),
    ):
        with pytest.raises(AtollError, match=r"a link to a file outside the run folder|leads out of") as error:
            resume()
        assert "hunter2" not in str(error.value)
    assert (tmp_path / "secret").read_text() == "password: [hunter2"


@pytest.mark.parametrize("recipe", [None, "digits-at"])
def test_half_a_recipe_is_never_completed_with_defaults(trained, tmp_path, recipe):
    folder = shutil.copytree(trained, tmp_path / "run")
    content = (folder / "recipe.yaml").read_bytes()
    half = content[: content.index(b"\n", len(content) // 2) + 1]
    (folder / "recipe.yaml").write_bytes(half)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(AtollError, match="was damaged or edited"):
        train(recipe, out=folder, resume=True)
    assert main(["train", "--resume", "--dry-run", "--out", str(folder)]) == 1
    with pytest.raises(RecipeError, match="was damaged or edited"):  # nor does another training start from it
        train(folder / "recipe.yaml", out=tmp_path / "other")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"has checkpoints but no recipe\.yaml"):
        train("digits-at", out=folder, resume=True)
