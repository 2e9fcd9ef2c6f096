"""Correct second derivatives of fused operations.

In PyTorch, several operations have wrong second derivatives, or none, in forward-over-forward, nested reverse or double
backward mode: fused normalizations, norms, determinants and attention.  ``tests/test_derivatives.py`` lists them.  This
module replaces them with elementary operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Call a model with other parameters and buffers, without changing the model.

    Unlike ``torch.func.functional_call``, it supports models that contain a module twice; ``functional_call`` would
    leave the other weights in this module.

    Args:
        model: a module with one input.
        tensors: parameters and buffers by name; one name is enough for shared tensors.
        x: the input.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> call_with(nn.Sequential(layer, layer), {"0.weight": torch.tensor([[2.0]])}, torch.ones(1, 1))
    tensor([[4.]])
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    given = {id(tensor): tensors[name] for name, tensor in named if name in tensors}
    places: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():  # every module once
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if id(tensor) in given:
                places[f"{prefix}.{name}" if prefix else name] = given[id(tensor)]
    output: Tensor = torch.func.functional_call(model, places, (x,), tie_weights=False)
    return output


@contextmanager
def elementary_operations() -> Iterator[None]:
    """Replace fused operations with elementary ones, which have correct derivatives of every order.

    Values agree up to rounding.  Passes are slower and take more memory, so use this only for second derivatives.

    >>> norm = torch.nn.LayerNorm(3).double()
    >>> direction = torch.eye(3, dtype=torch.float64)
    >>> def slope(x):
    ...     return torch.func.jvp(norm, (x,), (direction,))[1]
    >>> x = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64).repeat(3, 1)
    >>> with elementary_operations():
    ...     exact = torch.func.jvp(slope, (x,), (direction,))[1]
    >>> difference = (slope(x + 1e-6 * direction) - slope(x - 1e-6 * direction)) / 2e-6
    >>> torch.allclose(exact, difference, atol=1e-7)
    True
    """
    with sdpa_kernel(SDPBackend.MATH), _Elementary():
        yield


class _Elementary(TorchFunctionMode):
    """Replaces calls to fused operations."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement: Callable[..., Any] = _REPLACEMENTS.get(func, func)
        return replacement(*args, **(kwargs or {}))


def _standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered / (centered.square().mean(dims, keepdim=True) + eps).sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    shape = tuple(normalized_shape)
    return _affine(_standardize(input, tuple(range(-len(shape), 0)), eps), weight, bias, shape)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    groups = _standardize(input.reshape(len(input), num_groups, -1), (2,), eps).reshape(input.shape)
    return _affine(groups, weight, bias, (1, -1, *[1] * (input.dim() - 2)))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:  # linear, so the second derivatives are correct
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _group_norm(input, input.shape[1], weight, bias, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None or running_var is not None:  # running statistics must be updated
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = (0, *range(2, input.dim()))
    return _affine(_standardize(input, dims, eps), weight, bias, (1, -1, *[1] * (input.dim() - 2)))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    dims = tuple(range(v.dim())) if dim == -1 else tuple(d for d in range(v.dim()) if d != dim)
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


def _root(squares: Tensor) -> Tensor:
    """Return the square root, with zero derivatives at zero."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1).sqrt(), squares)


def _euclidean(x: Tensor, dim: int | tuple[int, ...] | None, keepdim: bool = False) -> Tensor:
    return _root(x.square().sum(dim, keepdim=keepdim))


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, **options: Any
) -> Tensor:
    if ord == 2 and not _given(options):
        return _euclidean(x, dim, keepdim)
    norm: Tensor = torch.linalg.vector_norm(x, ord, dim, keepdim, **options)
    return norm


def _norm(
    input: Tensor, p: Any = "fro", dim: int | tuple[int, ...] | None = None, keepdim: bool = False, **options: Any
) -> Tensor:
    if p in ("fro", 2, None) and not _given(options):
        return _euclidean(input, dim, keepdim)
    norm: Tensor = torch.norm(input, p, dim, keepdim, **options)
    return norm


def _linalg_norm(
    A: Tensor, ord: Any = None, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, **options: Any
) -> Tensor:
    of_vectors = isinstance(dim, int) or A.dim() == 1
    if (ord is None or (ord == 2 and of_vectors)) and not _given(options):
        return _euclidean(A, dim, keepdim)
    norm: Tensor = torch.linalg.norm(A, ord, dim, keepdim, **options)
    return norm


def _matrix_norm(
    A: Tensor, ord: Any = "fro", dim: tuple[int, int] = (-2, -1), keepdim: bool = False, **options: Any
) -> Tensor:
    if ord == "fro" and not _given(options):
        return _euclidean(A, dim, keepdim)
    norm: Tensor = torch.linalg.matrix_norm(A, ord, dim, keepdim, **options)
    return norm


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **options: Any) -> Tensor:
    if p == 2 and not _given(options):
        return input / _euclidean(input, dim, True).clamp_min(eps)
    return F.normalize(input, p, dim, eps, **options)


def _given(options: Mapping[str, Any]) -> bool:
    """Whether there are options that only the original operation supports."""
    return any(value is not None for value in options.values())


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [_euclidean(x, dim, True).clamp_min(eps) for x in (x1, x2)]
    return ((x1 / lengths[0]) * (x2 / lengths[1])).sum(dim)


def _pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return _vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    return _vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)


def _std(input: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return _root(torch.var(input, *arguments, **options))


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * b.sigmoid()


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return (input / 6 + 0.5).clamp(0, 1)


def _triangle(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign of the row permutation and the diagonal of the upper factor of the LU decomposition."""
    permutation, _, upper = torch.linalg.lu(A)
    return torch.linalg.det(permutation.detach()).round(), upper.diagonal(dim1=-2, dim2=-1)


def _det(A: Tensor) -> Tensor:
    sign, diagonal = _triangle(A)
    return sign * diagonal.prod(-1)


def _slogdet(A: Tensor) -> Any:
    sign, diagonal = _triangle(A)
    signs = sign * diagonal.detach().sign().prod(-1)
    return torch.return_types.linalg_slogdet((signs, diagonal.abs().log().sum(-1)))  # type: ignore[attr-defined]


def _logdet(input: Tensor) -> Tensor:
    sign, logarithm = _slogdet(input)
    return torch.where(sign > 0, logarithm, torch.nan)


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    inverse: Tensor = torch.linalg.inv(A)
    if is_vector:
        return (inverse @ B[..., None])[..., 0]
    return inverse @ B if left else B @ inverse


def _torch_instance_norm(input: Tensor, *arguments: Any, **options: Any) -> Tensor:
    weight, bias, mean, variance, use_input_stats, momentum, eps = arguments[:7]
    return _instance_norm(input, mean, variance, weight, bias, use_input_stats, momentum, eps)


def _torch_batch_norm(input: Tensor, *arguments: Any, **options: Any) -> Tensor:
    weight, bias, mean, variance, training, momentum, eps = arguments[:7]
    return _batch_norm(input, mean, variance, weight, bias, training, momentum, eps)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _torch_batch_norm,
    torch._weight_norm: _weight_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch.linalg.norm: _linalg_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.matrix_norm: _matrix_norm,
    F.normalize: _normalize,
    F.cosine_similarity: _cosine_similarity,
    F.pairwise_distance: _pairwise_distance,
    torch.cdist: _cdist,
    torch.std: _std,
    Tensor.std: _std,
    F.glu: _glu,
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys((torch.det, torch.linalg.det, Tensor.det), _det),
    **dict.fromkeys((torch.slogdet, torch.linalg.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
    torch.linalg.solve: _solve,
}
