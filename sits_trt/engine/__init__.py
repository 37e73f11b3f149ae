"""Engines: built by one backend, described by their manifest, verified before they are trusted.

Importing this package loads neither torch nor TensorRT.
"""

from sits_trt.engine.build import build_engine as build_engine
from sits_trt.engine.inspect import inspect_engine as inspect_engine
from sits_trt.engine.open import OpenedEngine as OpenedEngine
from sits_trt.engine.open import open_engine as open_engine
