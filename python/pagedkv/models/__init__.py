"""Models from Hugging Face transformers over a paged KV cache."""

from pagedkv.models.hook import register_attention
from pagedkv.models.loading import load_model
from pagedkv.models.metadata import AttentionMetadata
from pagedkv.models.transformers import TransformersModel

__all__ = ["AttentionMetadata", "TransformersModel", "load_model", "register_attention"]
