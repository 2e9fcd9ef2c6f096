"""RobustBench's functions by the calls of existing scripts, on CIFAR in the real format with few images."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.attacks import APGD, Square, robustbench
from atoll.attacks.robustbench import (
    BenchmarkDataset,
    ThreatModel,
    benchmark,
    clean_accuracy,
    load_cifar10,
    load_cifar100,
    load_clean_dataset,
)
from atoll.attacks.suites import SUITES
from atoll.data import CIFAR10, CIFAR100
from atoll.errors import DataError, InputError
from attack_cases import run_script
from data.fakes import fake_cifar


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with small data sets in ``data``, and a short standard version."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(robustbench, "CIFAR10", fake_cifar(CIFAR10, tmp_path / "data", packed=False))
    monkeypatch.setattr(robustbench, "CIFAR100", fake_cifar(CIFAR100, tmp_path / "data", packed=False))
    short = lambda threat: {"APGD-CE": APGD(threat, steps=10), "Square": Square(threat, queries=10)}  # noqa: E731
    monkeypatch.setitem(SUITES, "standard", short)
    return tmp_path


def linear_model(classes=10):
    """Classifies most images correctly: the class is that of the most similar of the first images."""
    x, y = load_clean_dataset(f"cifar{classes}", classes, "data")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, classes)).eval()
    flat = x.flatten(1) - 0.5
    model[1].weight.data[y], model[1].bias.data[y] = flat, -flat.square().sum(1) / 2 - 0.5 * flat.sum(1)
    return model


# Scripts as people write them for RobustBench; `model` exists.
SCRIPTS = {
    "the defaults": """
        from robustbench.eval import benchmark

        clean_acc, robust_acc = benchmark(model, dataset='cifar10', threat_model='Linf', eps=0.02)
    """,
    "everything by name, l2, saved": """
        from robustbench.eval import benchmark

        clean_acc, robust_acc = benchmark(
            model, n_examples=30, dataset='cifar10', threat_model='L2', to_disk=True, model_name='Mine2024',
            data_dir='./data', corruptions_data_dir='./data', device=torch.device('cpu'), batch_size=8, eps=1.0,
            log_path='log.txt')
    """,
    "enumerations, and a state that is resumed": """
        from pathlib import Path
        from robustbench import benchmark
        from robustbench.model_zoo.enums import BenchmarkDataset, ThreatModel

        results = [
            benchmark(model, 20, BenchmarkDataset.cifar_10, ThreatModel.Linf, eps=0.02, aa_state_path=Path('aa.json'))
            for attempt in range(2)
        ]
        assert results[0] == results[1]
        clean_acc, robust_acc = results[0]
    """,
    "data and accuracy, then AutoAttack": """
        from autoattack import AutoAttack
        from robustbench.data import load_cifar10
        from robustbench.utils import clean_accuracy

        x_test, y_test = load_cifar10(n_examples=20)
        clean_acc = clean_accuracy(model, x_test, y_test)
        adversary = AutoAttack(model, norm='Linf', eps=0.02, version='custom', attacks_to_run=['apgd-ce', 'apgd-dlr'])
        adversary.apgd.n_restarts = 1
        adversary.apgd.n_iter = 10
        x_adv = adversary.run_standard_evaluation(x_test, y_test)
        robust_acc = clean_accuracy(model, x_adv.to('cpu'), y_test, batch_size=7, device=torch.device('cpu'))
        assert (x_adv - x_test).abs().max() < 0.02001
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_for_robustbench_run(name, folder, capsys):
    model = linear_model()
    names = run_script(SCRIPTS[name], model=model)
    clean, robust = names["clean_acc"], names["robust_acc"]
    count = {"the defaults": 40, "everything by name, l2, saved": 30}.get(name, 20)
    x, y = load_cifar10(count)
    assert clean == pytest.approx((model(x).argmax(1) == y).double().mean().item())
    # A linear model: a point is robust if no other class can overtake its own within the ball (inside the box: more).
    logits, weight = model(x).detach(), model[1].weight.detach()
    gap = logits.gather(1, y[:, None]) - logits
    eps, dual = (1.0, 2) if "l2" in name else (0.02, 1)
    rise = eps * torch.linalg.vector_norm(weight[y][:, None] - weight, dual, dim=2)
    sure = ((gap > rise) | (torch.arange(10) == y[:, None])).all(1) & (logits.argmax(1) == y)
    assert sure.double().mean() <= robust < clean
    out = capsys.readouterr().out
    if "AutoAttack" not in name:
        assert f"Clean accuracy: {clean:.2%}\n" in out
        assert out.endswith(f"robust accuracy: {robust:.2%}\nAdversarial accuracy: {robust:.2%}\n")
    if "saved" in name:
        assert 100 * clean % 0.1 > 0.01  # which needs two digits
        assert 100 * robust % 0.1 > 0.01
        log = Path("log.txt").read_text()
        assert re.search(rf"robust accuracy after SQUARE: {robust:.2%} \(total time \d+\.\d s\)\n", log)
        info = json.loads(Path("model_info/cifar10/L2/Mine2024.json").read_text())
        assert {key: value for key, value in info.items() if value is not None} == {
            "dataset": "cifar10",
            "eps": 1.0,
            "clean_acc": str(round(100 * clean, 2)),
            "autoattack_acc": str(round(100 * robust, 2)),
        }
        assert {"link", "venue", "footnote", "corruptions_mce_3d"} < info.keys()


# Arguments of RobustBench, in order, with their defaults.
ARGUMENTS = {
    benchmark: {
        "n_examples": 10_000, "dataset": BenchmarkDataset.cifar_10, "threat_model": ThreatModel.Linf, "to_disk": False,
        "model_name": None, "data_dir": "./data", "corruptions_data_dir": None, "device": None, "batch_size": 32,
        "eps": None, "log_path": None, "preprocessing": None, "aa_state_path": None,
    },
    clean_accuracy: {"batch_size": 100, "device": None},
    load_cifar10: {"n_examples": None, "data_dir": "./data", "transforms_test": None},
    load_cifar100: {"n_examples": None, "data_dir": "./data", "transforms_test": None},
}  # fmt: skip


def test_arguments_are_those_of_robustbench():
    for function, expected in ARGUMENTS.items():
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert list(defaults.items()) == list(expected.items())
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_an_existing_file_keeps_its_other_fields(folder):
    path = Path("model_info/cifar100/Linf/Mine.json")
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "A paper", "clean_acc": "1.0"}')
    clean, _ = benchmark(linear_model(100), 50, "cifar100", "Linf", True, "Mine", eps="1/255")
    info = json.loads(path.read_text())
    assert (info["name"], info["clean_acc"], info["eps"]) == ("A paper", str(round(100 * clean, 2)), "1/255")


def test_preprocessing_gets_pil_images(folder):
    x, y = load_cifar10(5)
    flipped, labels = load_cifar10(
        5, "data", lambda image: torch.tensor(np.array(image)).permute(2, 0, 1).flip(2) / 255
    )
    assert torch.equal(flipped, x.flip(3))
    assert torch.equal(labels, y)


def test_a_model_in_training_mode_is_a_warning(folder):
    model = nn.Sequential(linear_model(), nn.Dropout(0.9)).train()
    with pytest.warns(UserWarning, match="the model is in training mode"):
        clean, _ = benchmark(model, 10, eps=0.001)
    assert clean == 1.0
    assert model.training


class Foreign:
    """Like a member of RobustBench's own enumeration."""

    value = "L2"


def test_members_of_the_original_enumerations_are_accepted(folder):
    assert benchmark(linear_model(), 5, threat_model=Foreign(), eps=0.0)[1] == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "cifar-10"}, "dataset: got 'cifar-10'; did you mean cifar10"),
        ({"dataset": "imagenet"}, "dataset: imagenet is not supported; load the images and use AutoAttack"),
        ({"threat_model": "L1"}, "threat_model: got 'L1'; "),
        ({"threat_model": ThreatModel.corruptions}, "threat_model: corruptions are not supported; expected Linf or L2"),
        ({"threat_model": "corruptions_3d"}, "threat_model: corruptions are not supported"),
        ({"eps": None}, "eps: expected a radius such as 8/255, got None"),
        ({"to_disk": True}, "model_name: expected the name of the file for to_disk=True, got None"),
        ({"model": [nn.Identity()]}, "model: expected one module, got list; benchmark one model at a time"),
        ({"preprocessing": "Res224"}, "preprocessing: expected a function of a PIL image, got 'Res224'"),
        ({"n_examples": 0}, "n_examples: expected at least 1, got 0"),
        ({"device": "cuda:77"}, "device: cuda:77 is not available"),
    ],
)
def test_wrong_arguments_are_refused(folder, options, sentence):
    with pytest.raises(InputError, match=sentence):
        benchmark(**{"model": nn.Identity().eval(), "eps": 0.1, **options})


def test_missing_data_are_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("requests.sessions.Session.request", lambda *_, **__: pytest.fail("a request"))
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is missing; put it into"):
        load_cifar10(data_dir=tmp_path)


def test_accuracy_against_its_definition():
    x, y = torch.rand(23, 1, 4, 4), torch.arange(23) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    expected = (model(x).argmax(1) == y).sum().item() / 23
    assert clean_accuracy(model, x, y) == clean_accuracy(model, x, y, batch_size=5, device="cpu") == expected
