"""Checkpoints: Hugging Face directories and GGUF files in, plain and quantized directories out, and their tokenizer.

Importing this package loads neither torch nor transformers; reading a tensor loads torch.
"""

from sits_trt.checkpoint.checkpoint import Checkpoint as Checkpoint
from sits_trt.checkpoint.checkpoint import open_checkpoint as open_checkpoint
from sits_trt.checkpoint.convert import convert as convert
from sits_trt.checkpoint.materialize import materialize as materialize
from sits_trt.checkpoint.quantized import refuse_quantized as refuse_quantized
from sits_trt.checkpoint.quantized import write_quantized as write_quantized
from sits_trt.checkpoint.source import source_digest as source_digest
from sits_trt.checkpoint.tokenizer import Tokenizer as Tokenizer
from sits_trt.checkpoint.tokenizer import load_tokenizer as load_tokenizer
