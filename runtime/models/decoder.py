"""The decoder-only transformer: weights and forward pass.

What differs between families is in `ModelConfig` and `family.LayerForm`. No method reads a tensor's value on the host,
so a forward can be captured into a CUDA graph.

With tensor parallelism a decoder is that of one rank: config and weights are the rank's part (`weight_split.py`), and
the sums and the logits of all ranks come from its communicator. A family needs no code for that, as long as every
linear layer behind split ones is called by `row_parallel`. With pipeline parallelism it has the layers of one stage
(`pipeline_stages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer, Kernels
from plait.kernels.quantized_weights import SimpleWeight, StackedWeight, select_outputs
from plait.kernels.reference import ops
from plait.runtime.config import WeightFormat
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.communicator import SINGLE, Communicator
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.layers import HEAD, MLP, Attention, Layer, MoE, Projection, StepUpdates, place_of
from plait.runtime.models.loading.rope_tables import build_rope_tables
from plait.runtime.models.loading.torch_weights import TorchWeightLoader
from plait.runtime.models.pipeline_stages import Stage
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.models.rope import partial_rotary_permutation
from plait.runtime.models.weight_split import vocabulary_range

CosSin = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, D // 2] float32


class Decoder:
    """A model's weights and its forward pass over ragged batches.

    Shapes: T tokens, C hidden size, V vocabulary, H query heads, G KV heads, D head size, F MLP size. The constructor
    raises InputError if the family does not support float16 and `dtype` is float16.

    `stage`: the layers that are loaded; None: all. Only the first stage can `embed`, only the last one has logits.
    """

    embedding: SimpleWeight  # [V, C], of the first stage
    norm: torch.Tensor  # [C], of the last stage, as the head
    head: SimpleWeight  # [V, C]

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] = lambda fraction: None,
        weight_format: WeightFormat = "bf16",
        communicator: Communicator = SINGLE,
        stage: Stage | None = None,
    ) -> None:
        self.form = FAMILIES_BY_NAME[config.architecture].layer
        if dtype == torch.float16 and self.form.overflows_float16:
            raise InputError(f"activations of {config.architecture} overflow float16; use bfloat16 or float32")
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        self._embedding_scale = config.embedding_scale
        if self.form.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        self.communicator = communicator
        self.vocabulary = vocabulary_range(config.vocab_size, communicator.rank)  # of the embedding and the head
        self._weights, self._names = weights, set(weights.names())
        self._loader = TorchWeightLoader(weights, weight_format, dtype, device)
        self.stage = stage or Stage(0, config.num_layers, config.num_layers)
        if self.stage.is_first:
            self.embedding = self._load_embedding()
        self.layers: list[Layer] = []
        for index in self.stage.layers:
            self.layers.append(self.load_layer(index, f"model.layers.{index}"))
            progress(len(self.layers) / len(self.stage.layers))
        if self.stage.is_last:
            self.norm = self.load_norm("model.norm.weight")
            self.head = self._load_head()
        self.rope_tables: list[CosSin] = [
            (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for cos, sin in build_rope_tables(config)
        ]
        self._updates: StepUpdates | None = None  # of the step that is computed

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: AttentionLayout,
        kv_cache: Sequence[LayerCache],
        hidden: torch.Tensor | None = None,
        updates: StepUpdates | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, C] of token_ids [T] after the last norm, or after the stage's last layer.

        hidden: those that the stage before returned; None in the first stage. May be overwritten. Writes KV into
        `kv_cache`, one entry per layer of the stage. updates: what adapters add to the products; None: nothing.
        """
        self._updates = updates
        cos_sin = self.rope_tables  # fused operators index the whole tables by position
        if self.kernels.fused is None:
            cos_sin = [(cos[layout.positions], sin[layout.positions]) for cos, sin in self.rope_tables]
        x, delta = self.embed(token_ids) if hidden is None else hidden, None
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x, delta = self.layer_forward(layer, x, delta, cos_sin, cache, layout)
        if not self.stage.is_last:
            return x if delta is None else x + delta  # rounded as in the next layer's norm
        return self.add_rms_norm(x, delta, self.norm)[1]

    def logits(
        self, hidden: torch.Tensor, columns: torch.Tensor | None = None, updates: StepUpdates | None = None
    ) -> torch.Tensor:
        """Logits [n, V] float32 of hidden [n, C]; with token ids `columns` [k], only those columns: [n, k].

        updates: what adapters add to the head for these rows; None: nothing.
        """
        if columns is None:
            return self.unconverted_logits(hidden, updates).float()
        if self.communicator.rank.size > 1 or updates is not None:
            return self.logits(hidden, None, updates)[:, columns]
        head = self.kernels.dequantize_rows(self.head, columns, self.dtype)
        return self._soft_capped(self.kernels.linear(hidden * self.config.logit_scale, head, None)).float()

    def unconverted_logits(self, hidden: torch.Tensor, updates: StepUpdates | None = None) -> torch.Tensor:
        """Logits [n, V] of hidden [n, C] in the model's dtype."""
        logits, size = self.rank_logits(hidden, updates), self.communicator.rank.size
        if size == 1:
            return logits
        width = -(-self.config.vocab_size // size)  # the last rank may have fewer tokens
        padded = torch.nn.functional.pad(logits, (0, width - logits.shape[1]))
        return self.communicator.gather_columns(padded)[:, : self.config.vocab_size]

    def rank_logits(self, hidden: torch.Tensor, updates: StepUpdates | None = None) -> torch.Tensor:
        """Logits of hidden [n, C] for the tokens `vocabulary`, in the model's dtype."""
        scale = self.config.logit_scale
        scaled = hidden if scale == 1.0 else hidden * scale
        logits = self.kernels.linear(scaled, self.head, None)
        if updates is not None:
            updates.add_to(logits, scaled, HEAD)
        return self._soft_capped(logits)

    def _soft_capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Writes cap * tanh(logits / cap) to the logits, where the model has a cap."""
        if self.config.logit_softcap:
            self.kernels.soft_cap_in_place(logits, self.config.logit_softcap)
        return logits

    # -- steps ------------------------------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C] of token_ids [T]."""
        if self.communicator.rank.size == 1:
            rows = self.kernels.dequantize_rows(self.embedding, token_ids, self.dtype)
        else:
            first, end = self.vocabulary
            is_here = (token_ids >= first) & (token_ids < end)
            rows = self.kernels.dequantize_rows(self.embedding, (token_ids - first) * is_here, self.dtype)
            rows = self.communicator.sum(rows * is_here[:, None])  # one rank's is not 0
        if self._updates is not None:
            self._updates.add_to_embeddings(rows, token_ids)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def project(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """A product of the step, with what adapters add to it: x [T, K] -> [T, N]."""
        out = self.kernels.linear(x, projection.weight, projection.bias)
        if self._updates is not None:
            self._updates.add_to(out, x, projection.place)
        return out

    def row_parallel(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """A linear layer whose inputs are split among the ranks: x [T, K / ranks] -> [T, C]."""
        return self.communicator.sum(self.project(x, projection))

    def layer_forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos_sin: Sequence[CosSin],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over the residual x + delta, both [T, C].

        Returns the new residual again as two summands (x, delta): the next norm adds them in its own kernel.
        """
        x, h = self.pre_norm(x, delta, layer.attention_norm)
        delta = self.post_norm(self.attend(layer.attention, h, cos_sin, cache, layout), layer.post_attention_norm)
        x, h = self.pre_norm(x, delta, layer.mlp_norm)
        return x, self.post_norm(self.mlp(layer.mlp, h), layer.post_mlp_norm)

    def pre_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, the input of attention or MLP), both [T, C]: the sum's norm, where the layer has one."""
        if weight is not None:
            return self.add_rms_norm(x, delta, weight)
        x = x if delta is None else x + delta
        return x, x

    def post_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The norm of the output [T, C] of attention or MLP, where the layer has one."""
        return x if weight is None else self.rms_norm(x, weight)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its norm), both [T, C]. A fused kernel writes the sum into x."""
        if delta is not None and self.kernels.fused is not None:
            return x, self.kernels.fused.add_rms_norm(delta, x, weight, self.config.rms_norm_eps)
        x = x if delta is None else x + delta
        return x, self.rms_norm(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of x [T, C] (arXiv:1910.07467)."""
        return self.kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def attend(
        self,
        attention: Attention,
        h: torch.Tensor,
        cos_sin: Sequence[CosSin],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> torch.Tensor:
        """Attention of h [T, C] with its projections; returns [T, C]. The new KV is written to the cache first."""
        config, kernels = self.config, self.kernels
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        layer = AttentionLayer(cache, config.softmax_scale, attention.window, config.attention_softcap or None)
        qkv = self.project(h, attention.qkv)
        if attention.joint_norms is not None:
            self.norm_queries_and_keys(qkv, attention.joint_norms)
        qkv = qkv.view(len(h), heads + 2 * kv_heads, size)  # [T, H + 2 G, D]
        if kernels.fused is not None:
            cos, sin = cos_sin[attention.rope_table]
            weight, eps = attention.head_norm, config.rms_norm_eps
            q = kernels.fused.rotate_and_write(qkv, cos, sin, cache, layout, weight, eps)
            attended = kernels.fused.attention(q, layer, layout)
            return self.row_parallel(attended.view(len(h), heads * size), attention.output)
        qk = qkv[:, : heads + kv_heads]
        if attention.head_norm is not None:
            qk = kernels.rms_norm(qk, attention.head_norm, config.rms_norm_eps)
        qk = ops.rotary(qk, *cos_sin[attention.rope_table])
        ops.write_kv(qk[:, heads:], qkv[:, heads + kv_heads :], cache[0], cache[1], layout.write_slots)
        attended = kernels.paged_attention(qk[:, :heads], layer, layout)  # [T, H, D]
        return self.row_parallel(attended.reshape(len(h), heads * size), attention.output)

    def norm_queries_and_keys(self, qkv: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Norms all queries and all keys of each token of qkv [T, (H + 2 G) D] in place, with `joint_norms`."""
        num_q, num_k = (len(weight) for weight in weights)
        parts = qkv[:, :num_q], qkv[:, num_q : num_q + num_k]
        eps, size = self.config.rms_norm_eps, self.communicator.rank.size
        if size == 1:
            for part, weight in zip(parts, weights, strict=True):
                self.kernels.rms_norm_in_place(part, weight, eps)
            return
        squares = torch.stack([part.float().pow(2).mean(-1) for part in parts], dim=-1)  # [T, 2]
        # The ranks hold equally many heads; those that several of them hold are counted equally often.
        factors = torch.rsqrt(self.communicator.sum(squares) / size + eps)
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            part.copy_((part.float() * factors[:, i, None]).to(weight.dtype) * weight)

    def mlp(self, mlp: MLP | MoE, h: torch.Tensor) -> torch.Tensor:
        """The MLP, or the mixture of experts, of h [T, C]; returns [T, C]."""
        if isinstance(mlp, MoE):
            return self.moe(mlp, h)
        gate_up, is_silu = self.project(h, mlp.gate_up), self.form.activation == "silu"
        activate = self.kernels.silu_and_multiply if is_silu else self.kernels.gelu_tanh_and_multiply
        return self.row_parallel(activate(gate_up), mlp.down)

    def moe(self, experts: MoE, h: torch.Tensor) -> torch.Tensor:
        """The sum of each token's top experts, weighted by the router's softmax: [T, C] -> [T, C]."""
        settings = self.config.experts
        assert settings is not None
        scores = self.kernels.linear(h, experts.router, None).float().softmax(-1)  # [T, E]
        weights, expert_ids = scores.topk(settings.experts_per_token, dim=-1)  # [T, K]
        if settings.normalize_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = self.kernels.experts(h, weights, expert_ids, experts.gate_up, experts.down)
        return self.communicator.sum(outputs)  # the experts' width is split

    # -- loading ----------------------------------------------------------------------------------

    def _load_embedding(self) -> SimpleWeight:
        load = self._loader.load_output_head if self.config.tie_word_embeddings else self._loader.load_embedding
        return load("model.embed_tokens.weight")

    def _load_head(self) -> SimpleWeight:
        """The output head; one that is tied to the embedding is loaded again where that is in another stage."""
        if not self.config.tie_word_embeddings:
            return self._loader.load_output_head("lm_head.weight")
        return self.embedding if self.stage.is_first else self._load_embedding()

    def load_tensor(self, name: str) -> torch.Tensor:
        """The named weight in the decoder's dtype, on its device."""
        return self._weights.tensor(name, self.dtype, self.device)

    def load_layer(self, index: int, prefix: str) -> Layer:
        """Layer `index`; the names of its weights begin with `prefix`."""
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm = (
            None if name is None else self.load_norm(f"{prefix}.{name}.weight") for name in self.form.norms
        )
        return Layer(
            attention_norm=attention_norm,
            attention=self.load_attention(index, prefix),
            post_attention_norm=post_attention_norm,
            mlp_norm=mlp_norm,
            mlp=self.load_mlp(index, prefix),
            post_mlp_norm=post_mlp_norm,
        )

    def load_norm(self, name: str) -> torch.Tensor:
        """The factor that a norm multiplies by."""
        dtype = torch.float32 if self.form.float32_norms else self.dtype
        weight = self._weights.tensor(name, dtype, self.device)
        return weight + 1.0 if self.form.unit_norms and self._weights.container != "gguf" else weight

    def load_attention(self, index: int, prefix: str) -> Attention:
        """The attention weights of layer `index`."""
        config, is_joint = self.config, self.form.qk_norms == "joint"
        norms = self._qk_norms(f"{prefix}.self_attn")
        return Attention(
            qkv=self.load_qkv(f"{prefix}.self_attn"),
            output=self.load_projection(f"{prefix}.self_attn.o_proj"),
            head_norm=None if norms is None or is_joint else self._repeated_norms(*norms),
            joint_norms=norms if is_joint else None,
            window=config.window(index),
            rope_table=config.rope_table(index),
        )

    def load_qkv(self, prefix: str) -> Projection:
        """q, k and v as one projection; rows of partly rotated heads in the order of `partial_rotary_permutation`."""
        config = self.config
        if not self.form.fused_matrices:
            return self.load_projection(*(f"{prefix}.{part}_proj" for part in "qkv"))
        projection = self.load_projection(f"{prefix}.qkv_proj")
        if config.effective_rotary_dim == config.head_dim:
            return projection
        rotated_heads = config.num_heads + config.num_kv_heads
        rows = torch.arange((rotated_heads + config.num_kv_heads) * config.head_dim, device=self.device)
        rows = rows.view(-1, config.head_dim)  # [H + 2 G, D]
        order = partial_rotary_permutation(config.effective_rotary_dim, config.head_dim)
        rows[:rotated_heads] = rows[:rotated_heads, torch.tensor(order, device=self.device)]
        assert not isinstance(projection.weight, StackedWeight)  # it is one matrix of the file
        return projection._replace(weight=select_outputs(projection.weight, rows.flatten()))

    def load_mlp(self, index: int, prefix: str) -> MLP | MoE:
        """The MLP of layer `index`, or its experts."""
        experts = self.config.experts
        if experts is not None and experts.layers[index]:
            gate_up = [self.load_tensor(f"{prefix}.mlp.experts.{name}_proj.weight") for name in ("gate", "up")]
            return MoE(
                router=self.load_tensor(f"{prefix}.mlp.gate.weight"),
                gate_up=torch.cat(gate_up, dim=1),
                down=self.load_tensor(f"{prefix}.mlp.experts.down_proj.weight"),
            )
        gate_up_names = ("gate_up",) if self.form.fused_matrices else ("gate", "up")
        return MLP(
            gate_up=self.load_projection(*(f"{prefix}.mlp.{name}_proj" for name in gate_up_names)),
            down=self.load_projection(f"{prefix}.mlp.down_proj"),
        )

    def load_projection(self, *names: str) -> Projection:
        """The named linear layers as one, concatenated along the outputs."""
        biases = [self.load_tensor(f"{name}.bias") for name in names if f"{name}.bias" in self._names]
        weight = self._loader.load_matrix(*(f"{name}.weight" for name in names))
        return Projection(weight, torch.cat(biases) if biases else None, place_of(names[0]))

    def _qk_norms(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The weights of the norms on queries and keys; None if the model has none."""
        if f"{prefix}.q_norm.weight" not in self._names:
            return None
        return self.load_norm(f"{prefix}.q_norm.weight"), self.load_norm(f"{prefix}.k_norm.weight")

    def _repeated_norms(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The weights [D] of a query and of a key head for all heads: [H + G, D]."""
        return torch.stack([query] * self.config.num_heads + [key] * self.config.num_kv_heads)
