"""What fits into a device: tokens, requests, and what is wasted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.planning.layers import LayerShape, blocks_per_sequence, group_layers
from pagedkv.planning.model_config import ModelConfig

DEFAULT_RESERVE = 2 << 30
DEFAULT_UTILIZATION = 0.9
BLOCK_SIZES = (8, 16, 32, 64, 128)
# What most models with grouped queries have.
GROUPED_HEADS = 8
_FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Request:
    """A request as long as most are.

    Parameters
    ----------
    prompt_tokens, output_tokens : int
        Its lengths.
    shared_prefix_tokens : int
        Tokens of the prompt that all requests begin with.
    """

    prompt_tokens: int = 1024
    output_tokens: int = 512
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the lengths."""
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not 0 <= self.shared_prefix_tokens <= self.prompt_tokens:
            expected = f"0 to {self.prompt_tokens}, the prompt's tokens"
            raise InvalidArgumentError(f"shared_prefix_tokens: expected {expected}, found {self.shared_prefix_tokens}")


@dataclass(frozen=True)
class Capacity:
    """A plan.

    Parameters
    ----------
    dtype : str
        Element type of the cache.
    block_size, block_bytes : int
        Tokens of a block, and its bytes on each device.
    token_bytes : float
        Bytes of a token's keys and values, all layers and devices together.
    scale_bytes : int
        Bytes of the scales of an FP8 cache, one for keys and one for values of each layer and KV head.
    kv_bytes : int
        Bytes that are left for the cache on each device.
    num_blocks, num_tokens : int
        What fits, the null block left out.
    num_longest : int
        Sequences of the longest length that fit.
    num_requests : int
        Requests of the given lengths that fit at their longest.
    num_mean_requests : int
        Requests that fit when each is halfway through its answer.
    waste : float
        Share of the slots in their blocks that hold no token then.
    limited_by : str
        "memory", "seats" or "weights".
    warnings : list of str
        What limits, and what was assumed.
    """

    dtype: str
    block_size: int
    block_bytes: int
    token_bytes: float
    scale_bytes: int
    kv_bytes: int
    num_blocks: int
    num_tokens: int
    num_longest: int
    num_requests: int
    num_mean_requests: int
    waste: float
    limited_by: str
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Effect:
    """What a change would bring: a name, the plan with it, and how many times the requests fit; None if none does."""

    name: str
    capacity: Capacity
    gain: float | None


@dataclass(frozen=True)
class _Question:
    model: ModelConfig
    gpu_memory: int
    num_gpus: int
    request: Request
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    weight_bytes: int
    reserve: int
    utilization: float


def plan_capacity(
    model: ModelConfig,
    gpu_memory: int,
    *,
    request: Request | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    num_gpus: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    weight_bytes: int | None = None,
    reserve: int = DEFAULT_RESERVE,
    utilization: float = DEFAULT_UTILIZATION,
) -> Capacity:
    """Return what fits into memory.

    Parameters
    ----------
    model : ModelConfig
        The model.
    gpu_memory : int
        Bytes of a device.
    request : Request, optional
        Lengths to plan for.
    kv_cache_dtype : str
        Element type of the cache; "auto" for that of the weights.
    block_size : int
        Tokens per block.
    num_gpus : int
        Devices that share the weights and the KV heads (tensor parallel).
    max_model_len : int, optional
        Longest sequence; by default the model's.
    max_num_seqs : int
        Seats.
    weight_bytes : int, optional
        Bytes of all weights; by default those of the model.
    reserve : int
        Bytes on each device for activations and workspaces.
    utilization : float
        Share of the device's memory that is used at all.

    Raises
    ------
    InvalidArgumentError
        For a number out of range.
    """
    if weight_bytes is not None:
        model = model.with_weights(weight_bytes)
    question = _Question(
        model,
        gpu_memory,
        num_gpus,
        request or Request(),
        model.dtype if kv_cache_dtype == "auto" else _known_dtype(kv_cache_dtype),
        block_size,
        _longest(model) if max_model_len is None else max_model_len,
        max_num_seqs,
        model.weight_bytes,
        reserve,
        utilization,
    )
    return _answer(_checked(question))


def effects(
    model: ModelConfig,
    gpu_memory: int,
    *,
    request: Request | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    **rest: object,
) -> list[Effect]:
    """Return what other element types, block sizes and shares of a prefix would bring, and what grouped queries bring.

    Parameters are those of `plan_capacity`.
    """
    request = request or Request()

    def plan(**change: object) -> Capacity:
        arguments = {"request": request, "kv_cache_dtype": kv_cache_dtype, "block_size": block_size, **rest, **change}
        chosen = arguments.pop("model", model)
        return plan_capacity(chosen, gpu_memory, **arguments)  # type: ignore[arg-type]

    now = plan()
    changes: dict[str, dict[str, object]] = {}
    grouped = all(shape.num_kv_heads < model.num_q_heads for shape in model.layers.values())
    if grouped and model.num_q_heads > 1:
        changes["a KV head for each query head (no GQA)"] = {"model": _with_kv_heads(model, model.num_q_heads)}
    elif model.num_q_heads > GROUPED_HEADS:
        changes[f"{GROUPED_HEADS} KV heads (GQA)"] = {"model": _with_kv_heads(model, GROUPED_HEADS)}
    if now.dtype not in _FP8:
        changes["FP8"] = {"kv_cache_dtype": "float8_e4m3fn"}
    changes |= {f"blocks of {size}": {"block_size": size} for size in BLOCK_SIZES if size != block_size}
    if request.shared_prefix_tokens == 0:
        half = replace(request, shared_prefix_tokens=request.prompt_tokens // 2)
        changes["half of the prompt shared"] = {"request": half}
    else:
        changes["nothing shared"] = {"request": replace(request, shared_prefix_tokens=0)}
    found = []
    for name, change in changes.items():
        changed = plan(**change)
        gain = changed.num_mean_requests / now.num_mean_requests if now.num_mean_requests else None
        found.append(Effect(name, changed, gain))
    return found


def _with_kv_heads(model: ModelConfig, num_kv_heads: int) -> ModelConfig:
    layers = {
        layer: LayerShape(num_kv_heads, shape.head_dim, shape.sliding_window) for layer, shape in model.layers.items()
    }
    return replace(model, layers=layers)


def _checked(question: _Question) -> _Question:
    least = dict.fromkeys(("gpu_memory", "num_gpus", "block_size", "max_num_seqs", "max_model_len"), 1)
    for name, value in {**least, "reserve": 0, "weight_bytes": 0}.items():
        if getattr(question, name) < value:
            raise InvalidArgumentError(f"{name}: expected at least {value}, found {getattr(question, name)}")
    if not 0 < question.utilization <= 1:
        raise InvalidArgumentError(f"utilization: expected a share above 0, at most 1, found {question.utilization}")
    longest = question.request.prompt_tokens + question.request.output_tokens
    if longest > question.max_model_len:
        expected = f"at most {question.max_model_len} (max_model_len)"
        raise InvalidArgumentError(f"prompt_tokens + output_tokens: expected {expected}, found {longest}")
    return question


def _known_dtype(kv_cache_dtype: str) -> str:
    try:
        return GroupSpec(1, 1, 8, kv_cache_dtype).dtype
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"kv_cache_{error}") from error


def _longest(model: ModelConfig) -> int:
    if model.max_model_len is None:
        raise InvalidArgumentError(
            "max_model_len: expected the longest sequence, which the model does not say; found none"
        )
    return model.max_model_len


def _groups(question: _Question) -> list[GroupSpec]:
    """Return the cache groups on each device: it has its share of the KV heads, one at least."""
    split = {
        layer: LayerShape(-(-shape.num_kv_heads // question.num_gpus), shape.head_dim, shape.sliding_window)
        for layer, shape in question.model.layers.items()
    }
    # Layers are counted anew where some keep nothing.
    numbered = {place: shape for place, (_, shape) in enumerate(sorted(split.items()))}
    return group_layers(numbered, question.dtype, question.max_model_len)


def _answer(question: _Question) -> Capacity:
    layers = question.model.layers.values()
    config = CacheConfig(2, question.block_size, groups=_groups(question))
    scale_bytes = sum(2 * 4 * shape.num_kv_heads for shape in layers) if question.dtype in _FP8 else 0
    weights = -(-question.weight_bytes // question.num_gpus)
    scales = -(-scale_bytes // question.num_gpus)
    kv_bytes = int(question.gpu_memory * question.utilization) - weights - question.reserve - scales
    # One is the null block.
    num_blocks = max(0, kv_bytes // config.block_bytes - 1)
    request = question.request
    longest = _blocks(config, question.max_model_len, question)
    at_end = _blocks(config, request.prompt_tokens + request.output_tokens, question)
    middle = request.prompt_tokens + request.output_tokens // 2
    in_the_middle = _blocks(config, middle, question)
    shared = _shared_blocks(config, request)
    fits = [max(0, num_blocks - shared) // max(1, blocks - shared) for blocks in (at_end, in_the_middle)]
    seats = question.max_num_seqs
    limited_by = "weights" if num_blocks == 0 else "seats" if fits[1] > seats else "memory"
    return Capacity(
        question.dtype,
        question.block_size,
        config.block_bytes,
        _token_bytes(question),
        scale_bytes,
        max(0, kv_bytes),
        num_blocks,
        int(num_blocks / longest * question.max_model_len) if longest else 0,
        num_blocks // longest,
        min(fits[0], seats),
        min(fits[1], seats),
        _waste(config, middle),
        limited_by,
        _warnings(question, config, num_blocks, longest, fits[1]),
    )


def _token_bytes(question: _Question) -> float:
    """Return the bytes of a token on all devices together, windows not yet full."""
    one = CacheConfig(2, 1, groups=[GroupSpec(1, 1, 8, question.dtype)]).block_bytes / (2 * 8)
    return sum(2 * shape.num_kv_heads * shape.head_dim for shape in question.model.layers.values()) * one


def _blocks(config: CacheConfig, length: int, question: _Question) -> int:
    """Return the blocks of a sequence of this length in all groups."""
    limits = SchedulerConfig(question.max_num_seqs, max_num_batched_tokens=2048, max_model_len=length)
    return sum(blocks_per_sequence(group, limits) for group in config.groups)


def _shared_blocks(config: CacheConfig, request: Request) -> int:
    """Return the blocks that hold whole the prefix that requests share, in groups that keep it."""
    kept = [group for group in config.groups if group.sliding_window is None]
    return sum(request.shared_prefix_tokens // (group.block_size or 1) for group in kept)


def _waste(config: CacheConfig, length: int) -> float:
    """Return the share of the slots of a sequence that holds no token: half a block on average, and padding."""
    sizes = [group.block_size or 1 for group in config.groups]
    size = max(sizes)
    half = (size - 1) / 2
    return 1 - (1 - config.padding) * length / (length + half)


def _warnings(question: _Question, config: CacheConfig, num_blocks: int, longest: int, fits: int) -> list[str]:
    found = list(question.model.notes)
    heads = min(shape.num_kv_heads for shape in question.model.layers.values())
    if num_blocks == 0:
        found.append("the weights, the reserve and one block do not fit: nothing can run")
    elif num_blocks < longest:
        found.append(f"no sequence of {question.max_model_len} tokens fits: lower max_model_len")
    if fits > question.max_num_seqs:
        found.append(f"seats limit: {fits} requests would fit, max_num_seqs is {question.max_num_seqs}")
    elif num_blocks > 0 and fits < 8:
        found.append(f"memory limits: {fits} requests at once leave the device mostly waiting for weights to be read")
    if heads % question.num_gpus:
        found.append(f"{heads} KV heads do not divide by {question.num_gpus} devices: some are kept more than once")
    if config.padding > 0:
        found.append(f"{config.padding:.1%} of each block is padding between groups of layers")
    return found
