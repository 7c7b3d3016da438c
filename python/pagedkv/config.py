"""Configuration: frozen value objects; their defaults are the Rust core's."""

from pagedkv._core import CacheConfig, GroupSpec, SchedulerConfig, choose_layer_slots

__all__ = ["CacheConfig", "GroupSpec", "SchedulerConfig", "choose_layer_slots"]
