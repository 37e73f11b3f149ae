"""What a model is, as plain data: the vocabulary that every room shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

FULL_ATTENTION = 0
"""Window value of a layer that attends to everything before it."""

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3": 1, "int32": 4, "int64": 8,
}  # fmt: skip

CODED_KV_DTYPES = ("int8", "float8_e4m3", "int4")
"""Types of a KV pool whose rows are codes with one float16 scale per token and head (`ops.kv_quant`)."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. `kind` is the Hugging Face rope_type, or "none" for a layer without positions.

    The other fields mean what the Hugging Face keys of those names mean; kinds that do not use one leave it at
    its default. `attention_factor` multiplies the cosines and sines. `rotary_dim` is the number of leading
    dimensions of a head that are rotated, 0 for all.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotary_dim: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RopeSpec:
        return cls(**_known(cls, data))


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer: sizes, switches and numbers that decide its result.

    `layer_windows` has one entry a layer: the number of newest tokens it may attend to
    (the token itself included), or FULL_ATTENTION. Layers in `second_rope_layers` use `second_rope`.
    Norms multiply by `norm_offset` + weight; `post_norms` adds one after attention and one after the
    feed-forward network, before each is added to the residual stream. `attention_scale` 0 stands for
    head_dim**-0.5. A soft cap c turns x into c * tanh(x / c); 0 is none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    layer_windows: tuple[int, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    second_rope: RopeSpec | None = None
    second_rope_layers: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by before the softmax."""
        return self.attention_scale or self.head_dim**-0.5

    def layer_rope(self, index: int) -> RopeSpec:
        """Return the rotary embedding of layer `index`."""
        return self.second_rope if self.second_rope and index in self.second_rope_layers else self.rope

    def one_layer(self, index: int) -> ModelSpec:
        """Return the model that has layer `index` and no other."""
        return replace(
            self,
            num_layers=1,
            layer_windows=(self.layer_windows[index],),
            rope=self.layer_rope(index),
            second_rope=None,
            second_rope_layers=(),
        )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        second = data.get("second_rope")
        ropes = {
            "rope": RopeSpec.from_dict(data["rope"]),
            "second_rope": None if second is None else RopeSpec.from_dict(second),
        }
        return cls(**{**_known(cls, data), **ropes})


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of JSON-like `data` that are fields of the dataclass, lists as tuples."""
    names = {field.name for field in fields(cls)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key in names}


PER_CHANNEL = -1
"""Group size of a weight with one scale per output channel, as vLLM and AutoGPTQ write it."""


@dataclass(frozen=True)
class WeightFormat:
    """How one linear layer's weight is stored, and what its input is rounded to before the product.

    `codes` "int": whole numbers of `bits` 4 or 8; symmetric ones have the fixed zero point 2**(bits-1), otherwise
    each group has its own. `codes` "float8_e4m3": 8-bit floats around zero. One float16 scale per `group_size`
    inputs. `activations` "float16" leaves the input as it is; "float8_e4m3" rounds it with one scale per token,
    "int4" with one per token and group of inputs (`ops.activation_rounding`).
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    codes: str = "int"
    activations: str = "float16"

    def group_width(self, in_features: int) -> int:
        """Return how many inputs share one scale."""
        return in_features if self.group_size == PER_CHANNEL else self.group_size

    def num_groups(self, in_features: int) -> int:
        return in_features // self.group_width(in_features)

    def bits_per_weight(self, in_features: int) -> float:
        """Storage per weight, fp16 scales and uint8 zero points included."""
        return self.bits + (16 + (0 if self.symmetric else 8)) / self.group_width(in_features)

    def problem(self) -> str:
        """Return what no weight can have, empty where all is well."""
        if self.codes not in ("int", "float8_e4m3") or self.bits not in (4, 8):
            return f"{self.bits}-bit codes of kind '{self.codes}'"
        if self.codes == "float8_e4m3" and (self.bits != 8 or not self.symmetric):
            return "8-bit floats with zero points, or of other than 8 bits"
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            return f"groups of {self.group_size}"
        if self.activations not in ("float16", "float8_e4m3", "int4"):
            return f"activations rounded to '{self.activations}'"
        return ""


@dataclass(frozen=True)
class TileSpec:
    """Geometry of the KV pool. A tile holds `tile_tokens` tokens of one KV head, K and V apart.

    The pool is [tiles, layers, 2, kv_heads, tile_tokens, head_dim]: everything that one logical
    tile holds lies in one contiguous piece. A pool of one of CODED_KV_DTYPES has a second pool beside it, of
    float16 scales, of the same geometry without head_dim; INT4 codes lie two in a byte.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tile_tokens: int = 64
    kv_dtype: str = "float16"

    @classmethod
    def of(cls, model: ModelSpec, tile_tokens: int = 64, kv_dtype: str = "float16") -> TileSpec:
        return cls(model.num_layers, model.num_kv_heads, model.head_dim, tile_tokens, kv_dtype)

    def pool_shape(self, num_tiles: int) -> tuple[int, ...]:
        """Shape of the pool in elements as they are stored: bytes of two codes for INT4."""
        row = self.head_dim // 2 if self.kv_dtype == "int4" else self.head_dim
        return (*self.scales_shape(num_tiles), row)

    def scales_shape(self, num_tiles: int) -> tuple[int, ...]:
        """Shape of the scales of a coded pool: one for each row of the pool."""
        return (num_tiles, self.num_layers, 2, self.num_kv_heads, self.tile_tokens)

    @property
    def is_coded(self) -> bool:
        """Whether the pool holds codes and has a pool of scales beside it."""
        return self.kv_dtype in CODED_KV_DTYPES

    @property
    def tile_bytes(self) -> int:
        """Bytes of one logical tile: all layers, K and V, all heads, and their scales where there are some."""
        stored = "uint8" if self.kv_dtype == "int4" else self.kv_dtype
        scales_bytes = prod(self.scales_shape(1)) * DTYPE_BYTES["float16"] if self.is_coded else 0
        return prod(self.pool_shape(1)) * DTYPE_BYTES[stored] + scales_bytes

    def tiles_for(self, num_tokens: int) -> int:
        """Tiles that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.tile_tokens)
