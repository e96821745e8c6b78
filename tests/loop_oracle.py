"""The paper's equations written as loops over tokens, from the weights alone: a second witness beside the recorded numbers.

Nothing here uses the package's modules. Source: arXiv 2006.15595, equations 6 to 10; T5's buckets (arXiv 1910.10683).
"""

import math

import torch
import torch.nn.functional as F


def t5_bucket(distance: int, bins: int, max_distance: int) -> int:
    """Bucket of one distance (key minus query)."""
    side, distance = (bins // 2, distance) if distance > 0 else (0, -distance)
    exact = bins // 4
    if distance < exact:
        return side + distance
    grown = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (bins // 2 - exact))
    return side + min(grown, bins // 2 - 1)


class LoopEncoder:
    """Features of one unpadded sentence, in float64.

    Args:
        weights: a model's state dict.
        heads, encoding, tie_cls, bins, max_distance: its settings; ``bins=None`` without relative bias.
    """

    def __init__(self, weights, heads, encoding, tie_cls=False, bins=None, max_distance=128):
        prefix = "encoder.sentence_encoder."
        self.w = {key[len(prefix) :]: value.double() for key, value in weights.items() if key.startswith(prefix)}
        self.heads, self.encoding, self.bins, self.max_distance = heads, encoding, bins, max_distance
        self.cls_rule = encoding == "untied" and not tie_cls
        self.d = self.w["embed_tokens.weight"].shape[1] // heads

    def linear(self, x, name):
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def norm(self, x, name):
        return F.layer_norm(x, x.shape, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def head(self, x, h):
        return x[h * self.d : (h + 1) * self.d]

    def position(self, row, table):
        """Query and key of a row of the position table."""
        p = self.norm(self.w[f"{table}.embedding.weight"][row], f"{table}.layer_norm")
        return self.linear(p, f"{table}.query_proj"), self.linear(p, f"{table}.key_proj")

    def bias(self, i, j, h):
        """The whole positional term of one cell and head."""
        absolute = relative = 0.0
        if self.encoding == "untied":
            # rows: token i is row i + 1; theta1 is row 0 with itself, theta2 row 1 with itself
            row_i, row_j = i + 1, j + 1
            if self.cls_rule and i == 0:
                row_i = row_j = 0
            elif self.cls_rule and j == 0:
                row_i = row_j = 1
            query, key = (self.position(row, "positional_bias.untied")[k] for k, row in ((0, row_i), (1, row_j)))
            absolute = self.head(query, h) @ self.head(key, h) / math.sqrt(2 * self.d)
        if self.bins is not None:
            bucket = t5_bucket(j - i, self.bins, self.max_distance)
            if self.cls_rule and i == 0:
                bucket = self.bins // 2
            elif self.cls_rule and j == 0:
                bucket = self.bins
            relative = self.w["positional_bias.relative.weight"][bucket, h]
        return absolute + relative

    def attention(self, states, layer):
        name = f"layers.{layer}.self_attn"
        terms = {"untied": 2, "absolute": 1, "none": 1, "untied-projections": 4}[self.encoding]
        query, key, value = zip(*(self.linear(x, f"{name}.in_proj").chunk(3) for x in states), strict=True)
        if self.encoding == "untied-projections":
            positions = [self.position(i + 1, "untied_projections") for i in range(len(states))]
            query = [q + p for q, (p, _) in zip(query, positions, strict=True)]
            key = [k + p for k, (_, p) in zip(key, positions, strict=True)]
        outputs = []
        for i in range(len(states)):
            heads = []
            for h in range(self.heads):
                logits = [
                    self.head(query[i], h) @ self.head(key[j], h) / math.sqrt(terms * self.d) + self.bias(i, j, h)
                    for j in range(len(states))
                ]
                weights = torch.softmax(torch.stack([torch.as_tensor(logit) for logit in logits]), dim=0)
                heads.append(sum(weights[j] * self.head(value[j], h) for j in range(len(states))))
            outputs.append(self.linear(torch.cat(heads), f"{name}.out_proj"))
        return outputs

    def __call__(self, tokens):
        """(T,) token ids to (T, C)."""
        states = [self.w["embed_tokens.weight"][token] for token in tokens]
        if self.encoding == "absolute":
            states = [x + self.w["embed_positions.weight"][i] for i, x in enumerate(states)]
        if "layernorm_embedding.weight" in self.w:
            states = [self.norm(x, "layernorm_embedding") for x in states]
        prenorm, layer = "layer_norm.weight" in self.w, 0
        while f"layers.{layer}.fc1.weight" in self.w:
            name = f"layers.{layer}"

            def sublayer(states, function, norm):
                if prenorm:
                    mixed = function([self.norm(x, norm) for x in states])
                    return [x + y for x, y in zip(states, mixed, strict=True)]
                return [self.norm(x + y, norm) for x, y in zip(states, function(states), strict=True)]

            def feed_forward(states, name=name):
                return [self.linear(F.gelu(self.linear(x, f"{name}.fc1")), f"{name}.fc2") for x in states]

            states = sublayer(states, lambda s, n=layer: self.attention(s, n), f"{name}.self_attn_layer_norm")
            states = sublayer(states, feed_forward, f"{name}.final_layer_norm")
            layer += 1
        return torch.stack([self.norm(x, "layer_norm") if prenorm else x for x in states])
