"""The Checkpoint: a model's tensors by canonical name, read when asked for, with its spec and tokenizer files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_trt.checkpoint.config import family_of, parse_config
from sits_trt.checkpoint.expected import check_tensors
from sits_trt.checkpoint.formats.detect import KEY as QUANTIZATION_KEY
from sits_trt.checkpoint.formats.detect import read_foreign
from sits_trt.checkpoint.gguf_file import GgufFile
from sits_trt.checkpoint.gguf_model import GgufModel
from sits_trt.checkpoint.names import canonical_formats, places
from sits_trt.checkpoint.quantized import QUANT_NAME, read_formats
from sits_trt.checkpoint.quantized_parts import PARTS, check_part
from sits_trt.checkpoint.safetensors_files import SafetensorsFiles, read_json, weight_files
from sits_trt.checkpoint.source import find_source, source_digest
from sits_trt.checkpoint.text_part import TensorFiles, text_part
from sits_trt.checkpoint.tokenizer_files import save_tokenizer
from sits_trt.spec import ModelSpec, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Mapping[str, "Tensor"]):
    """Tensors by canonical (Hugging Face Llama) name, in the type they are stored in, each read when asked for.

    `spec` is the model, `formats` the formats of quantized linear layers by name (empty when nothing is
    quantized), `hf_config` the config.json, `directory` the folder that holds the files. Quantized layers
    have `<name>.qweight`, `.scales` and so on in place of `<name>.weight`.
    """

    def __init__(
        self,
        place: Path,
        hf_config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        formats: Mapping[str, WeightFormat],
        files: TensorFiles,
        canonical: bool,
    ) -> None:
        self.place = place
        self.directory = place if place.is_dir() else place.parent
        self.hf_config = dict(hf_config)
        self.generation_config = dict(generation_config)
        self.spec: ModelSpec = parse_config(hf_config, generation_config)
        self._files = files
        # A quantized checkpoint of ours holds canonical tensors, whatever the family.
        family = None if canonical else family_of(hf_config)
        self.formats = dict(formats) if family is None else canonical_formats(formats, self.spec, family)
        self._places = places(files.shapes, self.spec, family)
        self.shapes = {name: place.shape for name, place in self._places.items()}
        check_tensors(self.shapes, self.spec, self.formats, str(place))

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = place.cut(self._files.read(place.stored))
        layer, _, kind = name.rpartition(".")
        if layer in self.formats and kind in PARTS:
            check_part(name, tensor, self.formats[layer])
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def stored_names(self) -> list[str]:
        """Names of the tensors as the files have them, which differ from the canonical ones in some families."""
        return list(dict.fromkeys(place.stored for place in self._places.values()))

    def read_stored(self, name: str) -> Tensor:
        """Return a tensor by its stored name."""
        return self._files.read(name)

    def digest(self) -> str:
        """Return 32 hex digits that identify the content of the files."""
        return source_digest(self.place)

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer's files, chat template included, into `directory`."""
        save_tokenizer(self.place, directory)


def open_checkpoint(source: Path | str) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file, a packaged model by name, or a quantized checkpoint.

    Quantized checkpoints are ours, and INT4 ones of AutoAWQ, ModelOpt and compressed-tensors. Reads configs and
    headers only, and of the latter what tells their formats apart, such as zero points. Raises CheckpointError when
    the architecture, a config key, a file or a tensor is missing, unknown or of the wrong shape.
    """
    place = find_source(source)
    if place.is_file():
        model = GgufModel(GgufFile(place))
        return Checkpoint(place, model.config(), {}, {}, model, canonical=False)
    whole = read_json(place / "config.json")
    stored = SafetensorsFiles(weight_files(place))
    config, files = text_part(whole, stored)
    generation_file = place / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    if (place / QUANT_NAME).is_file():
        return Checkpoint(place, config, generation, read_formats(place), files, canonical=True)
    foreign = read_foreign(config, place, files)
    if foreign is None:
        stored.require_numbers()
        return Checkpoint(place, config, generation, {}, files, canonical=False)
    plain = {key: value for key, value in config.items() if key != QUANTIZATION_KEY}
    return Checkpoint(place, plain, generation, foreign.formats, foreign.files, canonical=False)
