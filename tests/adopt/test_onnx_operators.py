"""Operators against the expected outputs of ONNX's own node tests and against ONNX Runtime."""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_tests

from atoll.adopt.onnx_model import read_onnx
from atoll.adopt.onnx_operators import KNOWN, OPERATORS
from atoll.errors import InputError

# Features of supported operators that are refused.
REFUSED = [
    r"\d inputs of Attention are not supported",  # caches
    r"the attribute '(softcap|left_window_size|right_window_size)' of Attention .* is not supported",
    r"(antialiasing|the mode tf_crop_and_resize|the reduction \w+) is not supported",
    r"quantization in blocks is not supported",
    r"align_corners is supported only for whole sizes",
    r"the shape or data type of the tensor '.*' is not supported",  # float8 and int4
    r"dropout in training mode is random|batch normalization in training mode depends on the batch",
    r"the output '.*' does not depend on the input",  # Shape and Size
    r"Expected reduction dim \d to have non-zero size",
    r"the value '.*FloatNegInfCast' must be a constant, but it depends on the input",  # Attention as a function
    r"expected an opset from 9",
]
QUICK = [
    "batch_normalization", "clip", "concat", "conv", "convtranspose", "depthtospace",
    "dequantizelinear", "einsum", "expand", "flatten", "gather", "gelu", "gemm", "globalaveragepool",
    "groupnormalization", "hardsigmoid", "instance_normalization", "layernormalization", "lrn", "matmul",
    "pad", "prelu", "quantizelinear", "reducel2", "reducemax", "reducemean", "reshape", "resize", "selu", "slice",
    "softmax", "split", "squeeze", "tile", "topk", "transpose", "unsqueeze", "where",
]  # fmt: skip


def run_case(case, folder):
    """Run a node test: the first floating-point input is the input of the file, and the others are constants."""
    inputs, (expected, *_) = case.data_sets[0]
    arrays = [np.asarray(a) if isinstance(a, np.generic | np.ndarray) else a for a in inputs]
    position = next(i for i, a in enumerate(arrays) if is_floating(a))
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for i, (array, value) in enumerate(zip(arrays, model.graph.input, strict=True)):
        if i != position:
            tensor = array if isinstance(array, TensorProto) else numpy_helper.from_array(array)
            tensor.name = value.name
            model.graph.initializer.append(tensor)
    model.graph.input[position].type.tensor_type.ClearField("shape")  # other inputs would not fit
    (folder / "node.onnx").write_bytes(model.SerializeToString())
    net = read_onnx(folder / "node.onnx", output=model.graph.output[0].name)
    result = net(torch.from_numpy(arrays[position].copy())).detach().numpy()
    quantizes = any(node.op_type == "QuantizeLinear" for node in case.model.graph.node)  # whole numbers as floats
    assert result.dtype == expected.dtype or quantizes, case.name
    rtol = 1e-2 if expected.dtype == np.float16 else 1e-3
    np.testing.assert_allclose(result.astype(float), expected.astype(float), rtol=rtol, atol=1e-5, err_msg=case.name)


def is_floating(array):
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.ndim > 0


def run_cases(cases, folder):
    """Count the outcomes of the cases that consist of supported operators."""
    counts = Counter()
    for case in cases:
        inputs, outputs = case.data_sets[0]
        supported = all(node.op_type in OPERATORS | {"Constant": 0} for node in case.model.graph.node)
        opsets = {entry.domain for entry in case.model.opset_import}
        if (
            not supported
            or opsets != {""}
            or not any(map(is_floating, inputs))
            or not isinstance(outputs[0], np.ndarray)
        ):
            continue
        try:
            run_case(case, folder)
            counts["passed"] += 1
        except InputError as error:
            if not any(re.search(pattern, str(error)) for pattern in REFUSED):
                raise
            counts["refused"] += 1
    return counts


def test_node_tests_of_common_operators(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in QUICK:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    cases = [case for case in node_tests._NodeTestCases if "expanded" not in case.name]
    counts = run_cases(cases, tmp_path)
    assert counts["passed"] >= 200
    assert counts["refused"] <= 30


@pytest.mark.slow
def test_all_node_tests(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = run_cases(node_tests.collect_testcases(), tmp_path)
    assert counts["passed"] >= 900
    assert counts["refused"] <= 130


INT, FLOAT = np.int64, np.float32
# Operator, opset, shape of the input, further inputs, attributes: forms that the node tests do not have.
FORMS = [
    ("Softmax", 11, (2, 3, 4), [], {}),
    ("Softmax", 11, (2, 3, 4), [], {"axis": 2}),
    ("LogSoftmax", 9, (2, 3, 4), [], {"axis": -1}),
    ("Squeeze", 11, (2, 1, 3, 1), [], {"axes": [1, -1]}),
    ("Unsqueeze", 11, (2, 3), [], {"axes": [0, -1]}),
    ("Slice", 9, (3, 5, 6), [], {"starts": [1, -3], "ends": [4, 100], "axes": [1, 2]}),
    ("Slice", 10, (3, 5, 6), [INT([3, -1]), INT([-100, 0]), INT([1, 2]), INT([-1, -2])], {}),
    ("Split", 11, (2, 6), [], {"axis": 1, "split": [2, 4]}),
    ("Split", 18, (2, 7), [], {"axis": 1, "num_outputs": 3}),
    ("Pad", 10, (2, 3), [], {"pads": [0, 1, 2, 0], "value": 1.5}),
    ("Pad", 13, (2, 3), [INT([0, -1, 0, 2]), FLOAT(0.5)], {}),
    ("Pad", 13, (2, 3, 5, 5), [INT([0, 0, 2, 1, 0, 0, 1, 3])], {"mode": "reflect"}),
    ("Clip", 9, (2, 3), [], {"min": 0.2, "max": 0.6}),
    ("Clip", 9, (2, 3), [], {}),
    ("ReduceSum", 11, (2, 3, 4), [], {"axes": [1, -1], "keepdims": 0}),
    ("ReduceMean", 13, (2, 3, 4), [], {"axes": [2]}),
    ("ReduceMax", 18, (2, 3, 4), [INT([1])], {"keepdims": 0}),
    ("ReduceL2", 18, (2, 3, 4), [INT([-1])], {}),
    ("Upsample", 9, (2, 3, 4, 4), [FLOAT([1, 1, 2, 3])], {}),
    ("Upsample", 9, (2, 3, 4, 4), [FLOAT([1, 1, 2, 2])], {"mode": "linear"}),
    ("Resize", 10, (2, 3, 4, 4), [FLOAT([1, 1, 0.5, 1.5])], {}),
    ("Resize", 13, (2, 3, 4, 4), [None, None, INT([2, 3, 7, 5])], {"mode": "linear"}),
    ("Dropout", 10, (2, 3), [], {"ratio": 0.5}),
    ("GroupNormalization", 18, (2, 4, 3), [FLOAT([1, 2]), FLOAT([0, 1])], {"num_groups": 2}),
    ("BatchNormalization", 9, (2, 2, 4), [FLOAT([1, 2]), FLOAT([0, 1]), FLOAT([0, 0.5]), FLOAT([1, 2])], {}),
    ("AveragePool", 10, (2, 3, 7), [], {"kernel_shape": [3], "strides": [2], "ceil_mode": 1, "pads": [0, 1]}),
    ("AveragePool", 11, (2, 3, 7, 6), [], {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "count_include_pad": 1}),
    ("MaxPool", 12, (2, 3, 7, 6), [], {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [0, 0, 1, 2]}),
    ("MaxPool", 12, (2, 3, 7), [], {"kernel_shape": [3], "strides": [2], "auto_pad": "SAME_UPPER"}),
    ("MaxPool", 12, (2, 3, 8, 8), [], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("Conv", 11, (2, 4, 7, 6), [np.ones((6, 2, 3, 2), FLOAT)], {"group": 2, "strides": [2, 1], "pads": [0, 1, 2, 0]}),
    ("Conv", 11, (2, 2, 9), [np.ones((3, 2, 3), FLOAT)], {"strides": [2], "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", 11, (2, 2, 4), [np.ones((2, 3, 3), FLOAT)], {"strides": [2], "pads": [1, 0]}),
    ("ConvTranspose", 11, (2, 2, 4), [np.ones((2, 3, 3), FLOAT)], {"strides": [2], "output_padding": [1]}),
    ("Gemm", 9, (2, 3), [np.ones((3, 4), FLOAT), FLOAT([[1], [2]])], {"alpha": 0.5, "beta": 2.0}),
    ("PRelu", 9, (2, 3, 4), [FLOAT([[0.1], [0.2], [0.3]])], {}),
    ("PRelu", 9, (2, 3, 4), [FLOAT([0.1, 0.2, 0.3, 0.4])], {}),
    ("Gather", 11, (2, 3, 4), [INT([[0, -1], [1, 1]])], {"axis": 1}),
    ("Where", 9, (2, 3), [np.array([True, False, True]), FLOAT([1, 2, 3])], {"first": 1}),
    ("Div", 14, (2, 3), [FLOAT(3.0)], {"first": 1}),
    ("Pow", 13, (2, 3), [INT(2)], {}),
    ("TopK", 11, (2, 5), [INT([2])], {}),
    ("Einsum", 12, (2, 3, 4), [np.ones((4, 5), FLOAT)], {"equation": "bij,jk->bik"}),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_forms_agree_with_onnx_runtime(form, tmp_path):
    operator, opset, shape, inputs, attributes = form
    attributes = dict(attributes)
    names = [f"input{i}" if value is not None else "" for i, value in enumerate(inputs)]
    names.insert(attributes.pop("first", 0), "x")
    count = (
        len(attributes["split"])
        if "split" in attributes
        else attributes.get("num_outputs", 2 if operator == "TopK" else 1)
    )
    node = helper.make_node(operator, names, [f"y{i}" for i in range(count)], **attributes)
    initializers = [numpy_helper.from_array(np.asarray(v), f"input{i}") for i, v in enumerate(inputs) if v is not None]
    graph = helper.make_graph(
        [node],
        "form",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape[1:]])],
        [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", opset)], ir_version=8)
    path = tmp_path / "form.onnx"
    path.write_bytes(model.SerializeToString())
    x = torch.randn(shape)
    (expected,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y0"], {"x": x.numpy()})
    torch.testing.assert_close(read_onnx(path)(x).detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_numbers_are_computed_only_by_operators_of_the_table():
    assert KNOWN.keys() <= OPERATORS.keys()
