"""The timm adapter: its logic against a stand-in, always; and with the real timm wherever it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, jvp

from atoll.errors import InputError
from atoll.models import HybridViT, Timm, ViT, load_pretrained
from atoll.models.timm_adapter import import_timm
from models.timm_support import HAS_TIMM, fake_timm, installed


class TestAdapter:
    """With the stand-in."""

    @pytest.fixture(autouse=True)
    def timm(self) -> Iterator[None]:
        with installed(fake_timm()):
            yield

    def test_it_is_the_models_own_forward_on_normalized_inputs(self) -> None:
        model = Timm((3, 8, 8), 5, name="plain").eval()
        x = torch.rand(2, 3, 8, 8)
        mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
        net = model.body.get_submodule("net")
        maps = net.get_submodule("conv")((x - mean.view(3, 1, 1)) / std.view(3, 1, 1)).relu()
        torch.testing.assert_close(model.features(x), maps.mean((2, 3)))
        torch.testing.assert_close(model(x), model.head(maps.mean((2, 3))))
        assert model.head.out_features == 5

    def test_the_classifier_is_kept_once(self, tmp_path: Path) -> None:
        model = Timm((3, 8, 8), 5, name="plain")
        assert sorted(model.state_dict()) == [
            "body.net.conv.bias",
            "body.net.conv.weight",
            "head.bias",
            "head.weight",
        ]
        save_file(model.state_dict(), tmp_path / "m.safetensors")
        other = Timm((3, 8, 8), 5, name="plain")
        other.load_state_dict(load_file(tmp_path / "m.safetensors"))
        x = torch.rand(2, 3, 8, 8)
        assert torch.equal(model(x), other(x))

    def test_grey_images_take_the_average_mean_and_std(self) -> None:
        model = Timm((1, 8, 8), 5, name="plain")
        torch.testing.assert_close(model.normalize.mean, torch.tensor([0.2]))
        torch.testing.assert_close(model.normalize.std, torch.tensor([0.6]))
        assert model(torch.rand(2, 1, 8, 8)).shape == (2, 5)

    def test_options_and_pretrained_are_passed_on(self) -> None:
        model = Timm((3, 12, 12), 5, name="plain", pretrained=True, options={"img_size": 12})
        assert model(torch.rand(2, 3, 12, 12)).shape == (2, 5)
        assert (model.body.get_submodule("net.conv").weight == 0.25).all()  # type: ignore[union-attr]

    def test_training_mode_is_as_of_a_new_module(self) -> None:
        assert all(module.training for module in Timm((3, 8, 8), 5, name="plain").modules())

    def test_an_image_size_the_model_does_not_take(self) -> None:
        with pytest.raises(InputError, match=r"does not accept images of shape \(3, 9, 9\).*match model.*img_size"):
            Timm((3, 9, 9), 5, name="plain")

    def test_a_classifier_that_is_not_linear(self) -> None:
        with pytest.raises(InputError, match=r"refused: expected a single nn\.Linear as classifier, got Conv2d"):
            Timm((3, 8, 8), 5, name="refused")

    def test_a_classifier_that_does_not_fit_the_features(self) -> None:
        with pytest.raises(InputError, match="has 4 features, but its classifier expects 5"):
            Timm((3, 8, 8), 5, name="misfit")

    def test_an_unknown_name(self) -> None:
        with pytest.raises(InputError, match="no model 'pla'; did you mean one of plain"):
            Timm((3, 8, 8), 5, name="pla")

    def test_an_unknown_option(self) -> None:
        with pytest.raises(InputError, match=r"plain: .*color"):
            Timm((3, 8, 8), 5, name="plain", options={"color": True})

    def test_a_shape_that_is_no_image(self) -> None:
        with pytest.raises(InputError, match="channels, height, width"):
            Timm((8, 8), 5, name="plain")


def test_without_timm() -> None:
    with installed(None), pytest.raises(InputError, match=r"timm cannot be imported .*pip install atoll\[timm\]"):
        Timm((3, 32, 32), 10, name="resnet18")


# Not a skip: without timm these are not collected, and TestAdapter has covered the adapter.
if HAS_TIMM:

    @pytest.fixture(scope="module", autouse=True)
    def timm_can_be_imported() -> None:
        import_timm()

    REAL = [
        ("resnet18", (3, 32, 32), {}),
        ("resnet10t", (1, 32, 32), {}),
        ("vit_tiny_patch16_224", (3, 32, 32), {"img_size": 32, "patch_size": 8, "depth": 2}),
        ("mobilenetv3_small_050", (3, 32, 32), {}),
        ("convnext_atto", (3, 32, 32), {}),
        ("efficientnet_b0", (3, 32, 32), {}),
        pytest.param("vgg11", (3, 32, 32), {}, marks=pytest.mark.slow),  # 128 million weights
    ]

    @pytest.mark.parametrize(("name", "shape", "options"), REAL)
    def test_real_models_agree_with_timms_own_forward(
        name: str, shape: tuple[int, int, int], options: dict[str, int]
    ) -> None:
        model = Timm(shape, 7, name=name, options=options).eval()
        net = import_timm().create_model(name, num_classes=7, in_chans=shape[0], **options).eval()
        own = model.body.get_submodule("net").state_dict()
        place = next(path for path, module in net.named_modules() if module is net.get_classifier())
        head = {f"{place}.{key}": tensor for key, tensor in model.head.state_dict().items()}
        net.load_state_dict({**own, **head})
        x = torch.rand(2, *shape)
        logits = model(x)
        torch.testing.assert_close(logits, net(model.normalize(x)))
        torch.testing.assert_close(logits, model.head(model.features(x)))
        assert model.features(x).shape == (2, model.head.in_features)

    def test_real_model_saves_each_tensor_once_and_goes_forward(tmp_path: Path) -> None:
        model = Timm((3, 32, 32), 7, name="resnet18").eval()
        save_file(model.state_dict(), tmp_path / "m.safetensors")
        x = torch.rand(2, 3, 32, 32)
        parameters = dict(model.named_parameters())
        _, tangent = jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (parameters,))
        assert tangent.shape == (2, 7)

    def test_real_distilled_model_is_refused() -> None:
        with pytest.raises(InputError, match=r"nn\.Linear"):
            Timm((3, 224, 224), 7, name="levit_128s")

    def test_real_image_size_is_checked() -> None:
        with pytest.raises(InputError, match="img_size"):
            Timm((3, 32, 32), 7, name="vit_tiny_patch16_224")

    def test_real_unknown_name() -> None:
        with pytest.raises(InputError, match=r"resnet18\.nobody: Invalid pretrained tag"):
            Timm((3, 32, 32), 7, name="resnet18.nobody")
        with pytest.raises(InputError, match=r"did you mean one of .*resnet18"):
            Timm((3, 32, 32), 7, name="esnet18")

    def test_our_vit_is_timms(tmp_path: Path) -> None:
        """Same weights, same logits: names, layouts, epsilons and the order of operations agree."""
        options = {"img_size": 32, "patch_size": 8, "depth": 2}
        net = import_timm().create_model("vit_tiny_patch16_224", num_classes=7, **options).eval()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        save_file(net.state_dict(), tmp_path / "vit.safetensors")
        model = ViT((3, 32, 32), 7, variant="Ti", patch_size=8, depth=2).eval()
        assert load_pretrained(model, tmp_path / "vit.safetensors") == []
        x = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)

    def test_our_hybrid_is_timms(tmp_path: Path) -> None:
        """The same, up to the epsilons in the stem, where we follow the original and timm does not."""
        net = import_timm().create_model("vit_base_r50_s16_384", num_classes=7, img_size=45, depth=1).double().eval()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.2)
        save_file(net.state_dict(), tmp_path / "hybrid.safetensors")
        model = HybridViT((3, 45, 45), 7, variant="B", depth=1).double().eval()
        assert load_pretrained(model, tmp_path / "hybrid.safetensors") == []
        x = torch.rand(2, 3, 45, 45, dtype=torch.float64)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
