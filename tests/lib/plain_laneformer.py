"""An independent Laneformer: the formulas, in float64, on a checkpoint's own tensors and config.

No KV cache, no schedule, no batched lanes: a loop over layers, one over lanes, one over heads.
RoPE multiplies complex numbers made of neighbouring elements. Shares no code with what it judges.
"""

import math

import torch


def rms_norm(x, gain, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def rotate(x, angles):
    """Neighbors (2k, 2k + 1) of x [tokens, d] as complex numbers, rotated by [tokens, d / 2]."""
    z = torch.view_as_complex(x.reshape(x.shape[0], -1, 2).contiguous())
    return torch.view_as_real(z * torch.exp(1j * angles)).reshape(x.shape)


def attention(x, wq, wk, wv, wo, d, angles, window):
    tokens = x.shape[0]
    q, k, v = x @ wq.T, x @ wk.T, x @ wv.T
    heads, kv_heads = q.shape[1] // d, k.shape[1] // d
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    seen = (j <= i) & (j > i - window) if window else j <= i
    out = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        qh = rotate(q[:, h * d : (h + 1) * d], angles)
        kh = rotate(k[:, g * d : (g + 1) * d], angles)
        score = (qh @ kh.T / math.sqrt(d)).masked_fill(~seen, -math.inf)
        out.append(torch.softmax(score, -1) @ v[:, g * d : (g + 1) * d])
    return torch.cat(out, -1) @ wo.T


def feed_forward(x, w1, w2, w3):
    gate = x @ w1.T
    return (gate * torch.sigmoid(gate) * (x @ w3.T)) @ w2.T


def plain_forward(config, tensors, token_ids):
    """Logits float64 [tokens, vocab] of one sequence."""
    t = {name: value.double() for name, value in tensors.items()}
    layers, lanes = config["num_hidden_layers"], config["num_lanes"]
    delay = config["broadcast_delay"]
    d = config["hidden_size"] // config["num_attention_heads"]
    eps = config["norm_eps"]

    def gain(name, lane):
        return t[name + ".scale"][lane] if name + ".scale" in t else t[name + ".weight"]

    position = torch.arange(len(token_ids), dtype=torch.float64)[:, None]
    pair = torch.arange(d // 2, dtype=torch.float64)[None, :]
    angles = position * config["rope_theta"] ** (-2 * pair / d)

    n = config["sliding_window_n_layers"]
    sliding = set(range(n)) if n >= 0 else set(range(layers + n, layers))
    sliding -= set(config["unclamped_layers"])

    h = [t["model.tok_embeddings.weight"][token_ids].clone() for _ in range(lanes)]
    raw = {"attention": [], "mlp": []}  # raw outputs, by layer, by lane

    def join(kind, layer, out):
        raw[kind].append(out)
        on = config["use_comm"] and config.get(f"use_{kind}_comm", True)
        for lane in range(lanes):
            if layer < delay and config["use_early_comm"]:
                h[lane] = h[lane] + sum(out)
            elif layer < delay or not on:
                h[lane] = h[lane] + math.sqrt(lanes) * out[lane]
            else:
                delayed = raw[kind][layer - delay]
                h[lane] = h[lane] + out[lane] + sum(delayed) - delayed[lane]

    for layer in range(layers):
        p = f"model.layers.{layer}."
        a, f = p + "attention.", p + "feed_forward."
        window = config["sliding_window"] if layer in sliding else 0
        out = []
        for lane in range(lanes):
            x = rms_norm(h[lane], gain(p + "attention_norm", lane), eps)
            w = [t[f"{a}{m}.weight"][lane] for m in ("wq", "wk", "wv", "wo")]
            out.append(attention(x, *w, d, angles, window))
        join("attention", layer, out)
        out = []
        for lane in range(lanes):
            x = rms_norm(h[lane], gain(p + "ffn_norm", lane), eps)
            out.append(feed_forward(x, *(t[f"{f}{m}.weight"][lane] for m in ("w1", "w2", "w3"))))
        join("mlp", layer, out)

    tied = config.get("tie_word_embeddings", False)
    kind = config["lm_head_type"]
    if kind == "lane":
        x = [rms_norm(h[lane], gain("model.norm", lane), eps) for lane in range(lanes)]
        return torch.cat(x, -1) @ t["lm_head.linear.weight"].T
    head = t["model.tok_embeddings.weight" if tied else "lm_head.weight"]
    if config["pre_norm_lane_agg"]:
        return rms_norm(sum(h), gain("model.norm", 0), eps) @ head.T
    x = [rms_norm(h[lane], gain("model.norm", lane), eps) for lane in range(lanes)]
    if kind == "vocab_parallel":
        return torch.cat([x[lane] @ head[lane].T for lane in range(lanes)], -1)
    return sum(x) / lanes @ head.T
