"""Checkpoints of wrapped models: names are found below their prefixes, and their normalization is never dropped."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atoll.adopt.adopt import adopt, choose_conventions
from atoll.adopt.sources import load_source
from atoll.adopt.weights import Normalization, load_state, read_state
from atoll.cli import main
from atoll.errors import CheckpointError, InputError
from atoll.models.adapted import Adapted, Conventions
from atoll.models.timm_adapter import import_timm, import_torchvision
from atoll.runs.run import open_run
from models.timm_support import HAS_TIMM

needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
MEAN, STD = torch.tensor([0.4]), torch.tensor([0.3])
NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def small_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def prefixed(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


WEIGHTS = small_net().state_dict()
IMAGE = (1, 1, 1, 1)
# Checkpoints with the normalization of a wrapper, as RobustBench and published training code write them.
WRAPPED = {
    "buffers next to the model": {"mu": MEAN.view(IMAGE), "sigma": STD.view(IMAGE), **prefixed("model.", WEIGHTS)},
    "a layer": {"normalize.mean": MEAN, "normalize.std": STD, **prefixed("model.", WEIGHTS)},
    "Sequential": {"0.mean": MEAN, "0.std": STD, **prefixed("1.", WEIGHTS)},
    "DataParallel": prefixed("module.", {"mean": MEAN, "std": STD, **prefixed("model.", WEIGHTS)}),
    "compiled": prefixed("_orig_mod.module.", {"0.mu": MEAN, "0.sigma": STD, **prefixed("1.", WEIGHTS)}),
    "buffers among the weights": {"mean": MEAN, "std": STD, **WEIGHTS},
    "underscores": {"_mean": MEAN, "_std": STD, **prefixed("net.", WEIGHTS)},
}
PLAIN = {
    "as it is": WEIGHTS,
    "DataParallel": prefixed("module.", WEIGHTS),
    "compiled": prefixed("_orig_mod.", prefixed("module.", WEIGHTS)),
    "wrapper": prefixed("module.model.", WEIGHTS),
}


@pytest.mark.parametrize("entry", [None, "state_dict", "net", "model", "model_state_dict"])
@pytest.mark.parametrize("state", [*WRAPPED.values(), *PLAIN.values()], ids=[*WRAPPED, *(f"plain-{n}" for n in PLAIN)])
def test_checkpoints_load_with_their_normalization(state, entry, tmp_path):
    torch.save(state if entry is None else {"epoch": 3, entry: state}, tmp_path / "net.pt")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    normalization = load_state(net, read_state(tmp_path / "net.pt"), "net.pt")
    assert torch.equal(net[1].weight, WEIGHTS["1.weight"])
    is_wrapped = any(state is wrapped for wrapped in WRAPPED.values())
    assert normalization == (Normalization((float(MEAN),), (float(STD),), "net.pt") if is_wrapped else None)


def test_a_module_that_normalizes_itself_needs_no_other_normalization():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    net.register_buffer("mean", torch.zeros(2))
    net.register_buffer("std", torch.ones(2))
    assert load_state(net, {name: tensor + 1 for name, tensor in net.state_dict().items()}, "net.pt") is None
    assert net.mean.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"mean": MEAN}, "unexpected: mean"),
        ({"mean": MEAN, "std": STD, "scale": STD}, "unexpected: mean, scale, std"),
        ({"ema.1.weight": WEIGHTS["1.weight"]}, "unexpected: ema.1.weight"),
        ({"mean": MEAN, "std": 0 * STD}, "expected finite means and positive standard deviations"),
        ({"mean": MEAN / 0, "std": STD}, "expected finite means and positive standard deviations"),
    ],
)
def test_nothing_else_is_dropped(others, message):
    with pytest.raises((InputError, CheckpointError), match=message):
        load_state(small_net(), {**prefixed("model.", WEIGHTS), **others}, "net.pt")


def test_the_normalization_of_a_checkpoint_is_used_or_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    torch.save(WRAPPED["Sequential"], "net.pt")
    assert main(["adopt", "net.py:build", "--weights", "net.pt", "--data", "Digits", "--out", "run"]) == 0
    assert "normalization from net.pt: mean 0.4, std 0.3" in capsys.readouterr().out
    run, net = open_run("run"), small_net()
    x, _ = run.data.tensors("test", 50)
    torch.testing.assert_close(run.model()(x), net((x - MEAN) / STD))
    normalization = load_source("net.py:build", weights="net.pt").normalization
    conventions, notes = choose_conventions({"mean": (0.0,)}, normalization)
    assert conventions == Conventions()
    assert notes == ["the normalization from net.pt is not used: mean 0.4, std 0.3"]


def test_a_normalization_of_other_inputs_needs_an_option():
    large = Normalization((123.7,), (58.4,), "net.pt")
    with pytest.raises(InputError, match=r"net.pt does not fit images in \[0, 1\].* give --range 0,255"):
        choose_conventions({}, large)
    options = {"range": (0.0, 255.0), "mean": (123.7,), "std": (58.4,)}
    assert choose_conventions(options, large)[0] == Conventions(**options)
    assert choose_conventions(Conventions(), large)[0] == Conventions()


@needs_timm
def test_models_of_timm_have_their_own_normalization(tmp_path):
    net = import_timm().create_model("resnet10t", num_classes=5).eval()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "resnet10t", "num_classes": 5}
    sources = {"timm": load_source("timm:resnet10t", weights=tmp_path / "model.safetensors")}
    for mean in (None, [0.5, 0.5, 0.5]):
        stated = {"pretrained_cfg": {"mean": mean, "std": [0.2, 0.3, 0.4]}} if mean else {}
        (tmp_path / "config.json").write_text(json.dumps({**config, **stated}))
        sources["stated" if mean else "default"] = load_source(str(tmp_path))
    x = torch.rand(2, 3, 32, 32)
    defaults = (net.default_cfg["mean"], net.default_cfg["std"])
    for name, (mean, std) in {"timm": defaults, "default": defaults, "stated": ([0.5] * 3, [0.2, 0.3, 0.4])}.items():
        source = sources[name]
        adapted = Adapted(source.module, choose_conventions(None, source.normalization)[0], 3).eval()
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
        torch.testing.assert_close(adapted(x), net((x - mean) / std))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "ResNet", "ConvNext"])
def test_folders_of_transformers(kind, tmp_path):
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    sizes = {
        "ViT": {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "ConvNext": {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(num_labels=10, num_channels=1, **sizes)
    net = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    net.save_pretrained(tmp_path / "folder")
    preprocessor = {"do_rescale": True, "rescale_factor": 1 / 255, "image_mean": [0.4], "image_std": [0.3]}
    (tmp_path / "folder/preprocessor_config.json").write_text(json.dumps(preprocessor))
    adoption = adopt(str(tmp_path / "folder"), "Digits", out=tmp_path / "run")
    assert adoption.notes[0].startswith("normalization from preprocessor_config.json: mean 0.4, std 0.3")
    x, _ = adoption.run.data.tensors("test", 50)
    logits = net(pixel_values=(x - MEAN) / STD).logits
    torch.testing.assert_close(adoption.run.model()(x), logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    state = read_state(tmp_path / "folder/model.safetensors")
    state = {name: tensor for name, tensor in state.items() if "classifier" not in name}
    save_file(state, tmp_path / "folder/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="missing keys: classifier"):
        load_source(str(tmp_path / "folder"))
