"""Export: the decoder as an ONNX graph with the two custom nodes, and its evaluation on the CPU."""

from sits_trt.graph.export import export_graph as export_graph
