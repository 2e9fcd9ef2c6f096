"""Models from elsewhere: ONNX files as PyTorch modules."""
