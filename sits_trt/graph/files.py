"""The files of a graph's directory."""

MODEL_FILE = "model.onnx"

DATA_FILE = "model.onnx.data"
"""The weights, beside MODEL_FILE, which finds them by this name."""
