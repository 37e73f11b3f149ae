"""The decoder as calls to ops: the oracle, the graph's source, and the twin of every fast path."""

from sits_trt.models.decoder import Decoder as Decoder
from sits_trt.models.decoder import build_decoder as build_decoder
from sits_trt.models.decoder import build_layer as build_layer
from sits_trt.models.decoder import build_oracle as build_oracle
