import numpy as np

from sits_trt.contract import bindings
from sits_trt.runtime.batch import build_inputs
from sits_trt.runtime.step import StepInputs
from sits_trt.spec import ModelSpec
from tests.support.runtime import TILE, Workbench, limits, prompt, request
from tests.support.tiny import tiny_spec


def test_arrays_are_the_engine_bindings() -> None:
    bench = Workbench(limits(step_tokens=24))
    decoding = bench.add(request(prompt(5), 9))
    bench.step()
    chunk, whole = bench.add(request(prompt(40, 1), 2)), bench.add(request(prompt(6, 2), 2))
    step = bench.scheduler.schedule()
    inputs = build_inputs(step)
    assert [advance.key for advance in step.advances] == [decoding, chunk, whole]
    assert inputs.input_ids.tolist() == [*bench.tokens(decoding), *prompt(40, 1)[:17], *prompt(6, 2)]
    assert inputs.query_starts.tolist() == [0, 1, 18, 24]
    assert inputs.context_lens.tolist() == [5, 0, 0]
    assert inputs.logit_indices.tolist() == [0, 23], "the chunk is not the end of its prompt: it draws nothing"
    tiles = [advance.tiles.tolist() for advance in step.advances]
    assert [len(row) for row in tiles] == [1, 2, 1]
    assert len({tile for row in tiles for tile in row}) == 4
    assert inputs.tile_table.tolist() == [[*row, 0][:2] for row in tiles]
    bench.scheduler.discard(step.number)


def test_names_and_types_are_those_of_the_contract() -> None:
    model: ModelSpec = tiny_spec()
    own = {"kv_pool", "logits"}
    expected = [binding.name for binding in bindings(model, TILE) if binding.name not in own]
    assert list(StepInputs.__dataclass_fields__) == expected
    bench = Workbench(limits())
    bench.add(request(prompt(5), 9))
    inputs = build_inputs(bench.scheduler.schedule())
    for binding in bindings(model, TILE):
        if binding.name not in own:
            array = getattr(inputs, binding.name)
            assert (array.dtype, array.ndim) == (np.dtype(binding.dtype), len(binding.shape))
            assert array.flags.c_contiguous
