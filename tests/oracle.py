"""The transformer once more, in numpy float64, a sequence at a time: no batch, no cache."""

import numpy as np

from jaxpt.models.config import ModelConfig, MoEConfig


def logits(params, tokens, config: ModelConfig) -> np.ndarray:
    """Logits [T, V] of one sequence of T tokens."""
    params = _float64(params)
    x = params["embed_tokens"][np.asarray(tokens)]
    for layer in range(config.num_layers):
        p = {name: value[layer] for name, value in params["layers"].items()}
        x = x + _attention(_norm(x, p["input_layernorm"], config), p, config)
        x = x + _feed_forward(_norm(x, p["post_attention_layernorm"], config), p, config)
    x = _norm(x, params["norm"], config)
    return x @ (params.get("lm_head", params["embed_tokens"].T))


def logprobs(params, prompt, completion, config: ModelConfig) -> np.ndarray:
    """Logprob of each token of the completion."""
    tokens = [*prompt, *completion]
    values = logits(params, tokens, config)
    values = values - _logsumexp(values)[:, None]
    first = len(prompt)
    return np.array([values[i - 1, tokens[i]] for i in range(first, len(tokens))])


def _float64(tree):
    if isinstance(tree, dict):
        return {name: _float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def _logsumexp(x):
    top = x.max(-1, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[..., 0]


def _norm(x, scale, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale


def _rotate(x, config):
    """x: [T, heads, head_dim]; pairs (i, i + head_dim / 2) turn by position * frequency."""
    half = config.head_dim // 2
    out = np.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / config.head_dim)
            a, b = x[position, :, i], x[position, :, i + half]
            out[position, :, i] = a * np.cos(angle) - b * np.sin(angle)
            out[position, :, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _attention(x, p, config):
    q, k, v = (
        np.einsum("td,dhk->thk", x, p[name]) for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
        q, k = _norm(q, p["q_norm"], config), _norm(k, p["k_norm"], config)
    q, k = _rotate(q, config), _rotate(k, config)
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        shared = head // config.queries_per_kv_head
        scores = q[:, head] @ k[:, shared].T / np.sqrt(config.head_dim)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - _logsumexp(scores)[:, None])
        out[:, head] = weights @ v[:, shared]
    return np.einsum("thk,hkd->td", out, p["o_proj"])


def _swiglu(x, gate, up, down):
    hidden = x @ gate
    return (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down


def _feed_forward(x, p, config):
    if not isinstance(config.feed_forward, MoEConfig):
        return _swiglu(x, p["gate_proj"], p["up_proj"], p["down_proj"])
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        scores = token @ p["router"]
        probabilities = np.exp(scores - _logsumexp(scores))
        chosen = np.argsort(-probabilities)[: config.feed_forward.experts_per_token]
        weights = probabilities[chosen]
        if config.feed_forward.normalize_weights:
            weights = weights / weights.sum()
        for weight, e in zip(weights, chosen):
            out[t] += weight * _swiglu(
                token, p["gate_proj"][e], p["up_proj"][e], p["down_proj"][e]
            )
    return out
