"""sits-trt: one recipe file to an INT4 large language model behind the Triton Inference Server."""

__version__ = "0.1.0"
