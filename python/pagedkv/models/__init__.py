"""Models from Hugging Face transformers over a paged KV cache."""

from pagedkv.models.gguf_llama import GGUFLlama
from pagedkv.models.hook import register_attention
from pagedkv.models.loading import load_model, open_model
from pagedkv.models.metadata import AttentionMetadata
from pagedkv.models.transformers import TransformersModel

__all__ = ["AttentionMetadata", "GGUFLlama", "TransformersModel", "load_model", "open_model", "register_attention"]
