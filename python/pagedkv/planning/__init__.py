"""How many tokens and requests a cache holds, from a model's configuration alone."""

from pagedkv.planning.capacity import Capacity, Effect, Request, effects, plan_capacity
from pagedkv.planning.model_config import ModelConfig, read_model_config

__all__ = ["Capacity", "Effect", "ModelConfig", "Request", "effects", "plan_capacity", "read_model_config"]
