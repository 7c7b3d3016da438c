"""A causal decoder of Hugging Face transformers that runs step plans."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.attention import load_kernels
from pagedkv.exceptions import UnsupportedError
from pagedkv.models.decode_graphs import DecodeGraphs
from pagedkv.models.hook import NAME, register_attention
from pagedkv.models.metadata import AttentionMetadata, AttentionStep, attention_step
from pagedkv.models.padding import compiles_products, pad_step
from pagedkv.models.plan_arrays import PlanArrays, input_tokens
from pagedkv.models.probe import probe_layers
from pagedkv.models.storage import choose_storage
from pagedkv.models.support import check_model, longest_model_len
from pagedkv.planning.layers import group_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagedkv.config import GroupSpec
    from pagedkv.kv_cache import KVCache


class TransformersModel:
    """A model of transformers with its keys and values in a paged cache.

    Works on any causal decoder that attends through transformers' AttentionInterface, and refuses others by name. The
    model's own attention implementation is replaced during `forward` only, so it can be used for other things between
    two steps, though not at the same time in another thread.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, in evaluation mode. It is run on one token to learn the shape of its cache.
    kv_cache_dtype : str or torch.dtype
        Element type of keys and values in the cache: "auto" for that of the weights, "float32", "float16", "bfloat16",
        or FP8: "float8_e4m3fn" or "float8_e5m2".
    k_scale, v_scale : float
        What stored FP8 keys and values must be multiplied by, in every layer.

    Attributes
    ----------
    layers : dict of int to LayerShape
        KV heads, head dimension and window of each layer's cache.
    dtype : str
        Element type of keys and values in the cache.
    vocab_size : int
        Logits per sample.
    max_model_len : int or None
        Longest sequence that the model's positions allow, where its configuration says so.
    device : torch.device
        Where the model lies.

    Raises
    ------
    UnsupportedError
        If the model needs something that a paged cache or `paged_attention` does not have.
    InvalidArgumentError
        If a cache can't have that type, or a scale stands beside one that is not FP8.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(vocab_size=32, intermediate_size=64, max_position_embeddings=128, **sizes)
    >>> model = TransformersModel(LlamaForCausalLM(config).eval())
    >>> [group.layers for group in model.cache_groups()], model.layers[0].head_dim, model.max_model_len
    ([[0, 1]], 16, 128)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_cache_dtype: str | torch.dtype = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        register_attention()
        config = model.config.get_text_config(decoder=True)
        check_model(model, config)
        weights = str(model.dtype).removeprefix("torch.")
        if model.device.type != "cpu" and weights == "float32":
            raise UnsupportedError("dtype: expected float16 or bfloat16 on a GPU, found float32")
        self._storage = choose_storage(kv_cache_dtype, k_scale, v_scale, weights, model.device)
        self._graphs: DecodeGraphs | None = None
        self.dtype = self._storage.dtype
        self._model = model
        self._configs = list(_configs(model))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size: int = config.vocab_size
        self.max_model_len = longest_model_len(config)
        self.device = model.device
        row = torch.zeros(1, dtype=torch.int32, device=self.device)
        # transformers warns of an input that starts with padding.
        token = row + (getattr(config, "pad_token_id", None) == 0)
        self.layers = probe_layers(model, config, lambda step: self._run(token, row, row, step))

    @property
    def module(self) -> PreTrainedModel:
        """The model of transformers that computes."""
        return self._model

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the model's generation configuration."""
        eos = getattr(self._model.generation_config, "eos_token_id", None)
        if eos is None:
            eos = getattr(self._model.config, "eos_token_id", None)
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def cache_groups(self, max_model_len: int | None = None) -> list[GroupSpec]:
        """Return the cache groups that the model needs: one for each shape and window of its layers.

        Parameters
        ----------
        max_model_len : int, optional
            Longest sequence, by default what the model's positions allow. A window that holds it is none.

        Returns
        -------
        list of GroupSpec
            For `CacheConfig`; one for a model whose layers are alike.
        """
        return group_layers(self.layers, self.dtype, max_model_len or self.max_model_len)

    def forward(
        self, plan: Any, kv_cache: KVCache, previous_tokens: torch.Tensor | None = None, rows: Any = None
    ) -> torch.Tensor:
        """Run the tokens of a plan.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned, with at least one token.
        kv_cache : KVCache
            The memory, to which the plan was applied; the keys and values of the plan's tokens are written.
        previous_tokens : torch.Tensor, shape (num_samples of the previous plan,), int32, optional
            What was sampled for the plan before this one; needed where ``plan.input_from`` refers to it.
        rows : numpy.ndarray, shape (num_rows,), int32, optional
            Tokens of the plan behind which logits are wanted; by default those that samples are drawn from.

        Returns
        -------
        torch.Tensor, shape (num_rows, vocab_size)
            Logits, in the model's dtype.

        Notes
        -----
        Sequences do not see one another, and the plan's arrays are taken as they are: the work in Python does not grow
        with the number of tokens or sequences.
        """
        if self._graphs is not None and self._graphs.takes(plan, rows, previous_tokens):
            return self._graphs.run(plan, previous_tokens)
        num_wanted = len(plan.sample_rows if rows is None else rows)
        if compiles_products(self._model.dtype, self.device):
            plan, rows = pad_step(plan, rows)
        arrays = PlanArrays.of(plan, self.device)
        sample_rows = arrays.sample_rows if rows is None else torch.from_numpy(rows).to(self.device)
        step = AttentionMetadata.from_plan(plan, kv_cache, slot_mapping=arrays.slot_mapping, **self._scales)
        return self._run(input_tokens(arrays, previous_tokens), arrays.positions, sample_rows, step)[:num_wanted]

    def load_kernels(self) -> int:
        """Load what the model will launch on its GPU, so that no request waits for it; return how many kernels.

        Those that are not on disk are compiled, which takes about a second each; `pagedkv warmup` does it beforehand.
        """
        head_dims = {shape.head_dim for shape in self.layers.values()}
        return load_kernels(self.device, str(self._model.dtype).removeprefix("torch."), self.dtype, head_dims)

    def capture_decoding(self, kv_cache: KVCache, max_num_seqs: int, **options: Any) -> None:
        """Run steps in which each sequence has one token by captured graphs from now on.

        Parameters
        ----------
        kv_cache : KVCache
            The one memory that steps are run over.
        max_num_seqs : int
            Most sequences of a step.
        **options
            Those of `DecodeGraphs`.
        """
        self._graphs = DecodeGraphs(self._run, kv_cache, self.device, max_num_seqs, self._scales, **options)

    @property
    def _scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale": self._storage.k_scale, "v_scale": self._storage.v_scale}

    @torch.inference_mode()
    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": token_ids[None], "position_ids": positions[None], NAME: step}
        if self._keeps_logits:
            inputs["logits_to_keep"] = sample_rows
        with self._paged(), attention_step(step):
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits if self._keeps_logits else logits[sample_rows]

    @contextmanager
    def _paged(self) -> Iterator[None]:
        # The public setter of a configuration also writes its sub-configurations, which then can't be put back.
        previous = [config._attn_implementation_internal for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, implementation in zip(self._configs, previous, strict=True):
                config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Yield each configuration that a layer of the model may ask for the attention implementation."""
    seen = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config
