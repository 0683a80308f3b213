"""The decoder layer of PoD models, one for all families: its attention takes distant scores from another layer.

Legend: B rows, T tokens, H query heads, H_kv KV heads, G = H / H_kv, D head dimension.

The running anchors travel from layer to layer as explicit positional tensors, one pair per KV head: the query group
[B, G, T, D] and the key [B, T, D]; under `share: kv` the value [B, T, D] and the key. An anchor head whose block goes
on puts its own there, elsewhere a layer hands on what it was given, and where no later layer reads a pair it is None,
as of a head that streams.
This form is exact under both kinds of gradient checkpointing, torch.compile and ZeRO-3. Positional it must be:
checkpointing closes over keyword arguments.

With a `SequenceShard`, T is the rank's part of the sequence outside attention and the whole sequence inside it, where
H and H_kv are the rank's own heads; so the anchors travel head-sharded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.model.sequence_parallel import SequenceShard
from pod_kernels import shared_score_attention

Anchors = tuple[Tensor | None, ...]  # (query group or value, key) of KV head 0, of KV head 1, ...


class PodAttention:
    """Self-attention whose distant logits come from the block's anchor layer (PoD, arXiv 2412.02252, Eq. 3 and 4).

    Under `share: kv` it is cross-layer attention (arXiv 2405.12981): plain causal attention to the anchor's keys and
    values. A layer without anchors then never uses its projections to keys and values (`unused_parameters`).

    Mixed into a family's attention, whose projections and norms it uses.
    """

    def plan(self, blocks: LayerBlocks) -> None:
        """Note which heads of this layer are anchors, and whose pair a later layer still reads.

        Args:
            blocks: the model's blocks.
        """
        layout, layer = blocks.layout(), self.layer_idx
        self.is_anchor = tuple(anchor == layer for anchor in layout.anchors[layer])
        self.streams = layout.streams[layer]
        self.has_keys = self.config.share != "kv" or any(self.is_anchor)
        self.measure_gate = False  # validation switches it on
        self.gate: Tensor | None = None  # mean share of the softmax on proximal tokens, of the last forward
        self.goes_on = tuple(not ends for ends in layout.ends[layer])

    def project(self, hidden_states: Tensor, has_keys: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, T, hidden] -> queries [B, T, H * D], keys and values [B, T, H_kv * D], before norm and RoPE.

        Keys and values are None unless the layer is to have its own.
        """
        q = self.q_proj(hidden_states)
        return (q, self.k_proj(hidden_states), self.v_proj(hidden_states)) if has_keys else (q, None, None)

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """What no output depends on: a checkpoint holds it, so that it loads as any of its family, and it never learns.

        Strategies that wait for every gradient (DDP, ZeRO) want it frozen.
        """
        for name in ("k_proj", "v_proj", "k_norm") if not self.has_keys else ():
            if hasattr(self, name):
                yield from getattr(self, name).parameters()

    def forward(
        self,
        hidden_states: Tensor,
        anchors: Anchors,
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: PodCache | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence: SequenceShard | None = None,
        unshared: bool = False,
    ) -> tuple[Tensor, Anchors]:
        """One layer of attention.

        Args:
            hidden_states: [B, T, hidden].
            anchors: the running anchors, 2 * H_kv entries (the rank's KV heads with `sequence`).
            position_embeddings: (cos, sin) of RoPE; None when the cache rotates.
            past_key_values: cache to write to and read from.
            lengths: [B] real tokens of left-padded rows.
            document_ids: [B, T] of packed documents.
            sequence: the rank's part of a sequence that several ranks share; lengths and document_ids are whole.
            unshared: plain causal attention with the layer's own queries, keys and values; without a cache.

        Returns:
            [B, T, hidden], and the running anchors for the next layer.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        has_keys = self.has_keys or unshared
        q, k, v = self.project(hidden_states, has_keys)
        q = q.view(shape)
        k, v = (q.new_empty(*q.shape[:2], 0, self.head_dim) if x is None else x.view(shape) for x in (k, v))
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k) if has_keys else k
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            # Under autocast the projections are half precision and the rotation of q and k is not.
            q, k = q.to(v.dtype), k.to(v.dtype)

        heads = range(len(self.is_anchor))
        if sequence is not None:
            heads = sequence.kv_heads(len(self.is_anchor))
            q, k, v = sequence.to_heads(q, k, v)

        travels = not unshared and (past_key_values is None or past_key_values.takes_anchors(q.shape[2]))
        following, q_distant, k_distant = anchors, None, None
        if travels:
            pairs = self._pairs(q, k, v, anchors, heads)
            following = self._hand_on(pairs, heads)
            if not all(self.is_anchor[number] or number in self.streams for number in heads):
                firsts, keys = zip(*pairs, strict=True)
                if self.config.share == "kv":
                    k, v = torch.stack(keys, dim=1), torch.stack(firsts, dim=1)
                else:
                    q_distant = q if self.config.share == "keys" else torch.cat(firsts, dim=1)
                    k_distant = torch.stack(keys, dim=1)
        if past_key_values is None:
            measures, windows = self.measure_gate and not unshared, ()
            if not unshared:
                windows = tuple(head for head, number in enumerate(heads) if number in self.streams)
                windows = windows or self.config.share == "window"
            if measures and q_distant is None and windows is not True:
                q_distant, k_distant = q, k  # its own scores, split where the others split theirs
            out = shared_score_attention(
                q,
                k,
                v,
                q_distant,
                k_distant,
                sink_size=self.config.sink_size,
                recent_size=self.config.recent_size,
                scale=self.scaling,
                lengths=lengths,
                document_ids=document_ids,
                window_only=windows,
                return_gate=measures,
            )
            if measures:
                out, gate = out
                self.gate = gate.mean()
        else:
            out = past_key_values.attend(self.layer_idx, q, k, v, q_distant, k_distant, self.scaling)
        if sequence is not None:
            out = sequence.to_tokens(out)
        out = out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(out), following

    def _pairs(self, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, heads: range) -> list[Anchors]:
        """Each head's pair: an anchor's own, else what was handed on; `heads` are the model's numbers of k's heads.

        A head that streams has its own too, which nobody looks at.
        """
        groups, pairs = q.shape[1] // len(heads), []
        for head, number in enumerate(heads):
            if self.is_anchor[number] or number in self.streams:
                first = {"scores": q[:, head * groups : (head + 1) * groups], "kv": v[:, head]}.get(self.config.share)
                pairs.append((first, k[:, head]))
            else:
                pairs.append(anchors[2 * head : 2 * head + 2])
        return pairs

    def _hand_on(self, pairs: list[Anchors], heads: range) -> Anchors:
        following: list[Tensor | None] = []
        for pair, number in zip(pairs, heads, strict=True):
            if not self.goes_on[number]:
                pair = (None, None)
            elif self.is_anchor[number]:
                # Copied out: a view would keep all heads' queries and keys alive as long as this pair travels.
                pair = (x if x is None else x.clone(memory_format=torch.contiguous_format) for x in pair)
            following += pair
        return tuple(following)


class PodDecoderLayer:
    """A pre-norm decoder layer that takes the running anchors and hands them on; mixed into a family's layer.

    Attributes:
        mlp_tiles: in training, the MLP runs on so many parts of the tokens, one after the other, and each part again
            in the backward: its inner activations take 1 / mlp_tiles of their memory.
    """

    mlp_tiles = 1

    def forward(
        self,
        hidden_states: Tensor,
        *anchors: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: PodCache | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence: SequenceShard | None = None,
        unshared: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """[B, T, hidden] and the anchors in; the same out."""
        attended, anchors = self.self_attn(
            self.input_layernorm(hidden_states),
            anchors,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            lengths=lengths,
            document_ids=document_ids,
            sequence=sequence,
            unshared=unshared,
        )
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        if self.mlp_tiles == 1 or not self.training:
            return hidden_states + self.mlp(normed), *anchors
        # As many tiles on every rank, whatever is in them: under ZeRO-3 each gathers the MLP's parameters.
        tiles = normed.tensor_split(self.mlp_tiles, dim=1)
        mapped = torch.cat([checkpoint(self.mlp, tile, use_reentrant=False) for tile in tiles], dim=1)
        return hidden_states + mapped, *anchors
