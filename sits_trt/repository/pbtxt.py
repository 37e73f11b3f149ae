"""Model configurations to config.pbtxt and back, through the server's own protobuf messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from sits_trt.errors import SitsError
from sits_trt.repository.config import ModelConfig
from sits_trt.wire import Tensor

CONFIG_NAME = "config.pbtxt"

MAX_BATCH_SIZE = 1
"""The batch dimension that clients of tensorrtllm_backend send; sequences are batched in flight, not here."""

MAX_LINE = 150


def to_message(config: ModelConfig) -> Any:
    """Return the ModelConfig protobuf message of `config`."""
    message = pb.ModelConfig(
        name=config.name,
        max_batch_size=MAX_BATCH_SIZE,
        input=[_input(tensor) for tensor in config.inputs],
        output=[
            pb.ModelOutput(name=t.name, data_type=pb.DataType.Value(f"TYPE_{t.dtype}"), dims=t.dims)
            for t in config.outputs
        ],
    )
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    if config.steps:
        message.platform = "ensemble"
        for step in config.steps:
            message.ensemble_scheduling.step.add(
                model_name=step.model, model_version=-1, input_map=step.inputs, output_map=step.outputs
            )
        return message
    message.backend = "python"
    message.model_transaction_policy.decoupled = config.decoupled
    message.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=config.instances)
    return message


def _input(tensor: Tensor) -> Any:
    message = pb.ModelInput(
        name=tensor.name,
        data_type=pb.DataType.Value(f"TYPE_{tensor.dtype}"),
        dims=tensor.dims,
        optional=tensor.optional,
    )
    if tensor.scalar:
        message.reshape.SetInParent()
    return message


def to_text(config: ModelConfig) -> str:
    """Return the text of `config`'s config.pbtxt, one tensor a line. Parsing it gives the same message back."""
    text = text_format.MessageToString(to_message(config), use_short_repeated_primitives=True)
    lines = text.splitlines()
    return "".join(f"{line}\n" for line in _fold(lines))


def _fold(lines: list[str]) -> Iterator[str]:
    """Put every block that fits one line on one line; what its lines hold stays as it is."""
    start = 0
    while start < len(lines):
        indent = len(lines[start]) - len(lines[start].lstrip())
        end = start
        if lines[start].endswith("{"):
            end = next(i for i in range(start + 1, len(lines)) if lines[i] == " " * indent + "}")
        folded = " " * indent + " ".join(line.strip() for line in lines[start : end + 1])
        if len(folded) <= MAX_LINE or start == end:
            yield folded
        else:
            yield lines[start]
            yield from _fold(lines[start + 1 : end])
            yield lines[end]
        start = end + 1


def parse(path: Path) -> Any:
    """Return the message that a config.pbtxt holds. Raises SitsError naming file and line when it is damaged."""
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except FileNotFoundError:
        raise SitsError(f"{path} is missing; build the repository again with 'sits-trt build'") from None
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise SitsError(f"{path} is no Triton model configuration ({error}); build the repository again") from None
