"""Request traces replayed on the scheduler that serves."""

from pagedkv._core import SaturatedReplay, read_lengths, replay_saturated

__all__ = ["SaturatedReplay", "read_lengths", "replay_saturated"]
