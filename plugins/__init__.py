"""Kernel bodies in OpenAI Triton and the TensorRT plugins around them."""
