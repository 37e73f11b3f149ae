"""The sweep: what a build costs in accuracy and brings in latency, measured through Triton Inference Server."""

from sits_trt.sweep.result import Status as Status
from sits_trt.sweep.result import SweepResult as SweepResult
from sits_trt.sweep.run import run_sweep as run_sweep
