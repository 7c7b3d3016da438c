"""What is done to single rows beside products and attention, on the CPU: norms, rotary positions, draws of tokens."""

from pagedkv._core import draw_tokens, rms_norm, rotary_embedding

__all__ = ["draw_tokens", "rms_norm", "rotary_embedding"]
