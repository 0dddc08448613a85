"""A whole training run in NumPy float64, written from docs/reproducibility.md alone.

It shares no code with the C++ and reads nothing that the C++ writes, so two independent programs
have to agree. Nothing here is clever: one array per quantity, the backward pass by hand.

  reference.py --self_test          checks this file (known answers, finite differences)
  reference.py --steps 5 ...        one JSON line per step: step, loss, grad_norm, lr

A run states every flag; their names are the chapter binary's. With --eval_samples N each line also
holds val_loss, the validation loss after that step's update.

Shapes: B samples of a global batch, S seq_len, H hidden_size, A heads, K kv heads, G = A / K,
D head_dim, F ffn_hidden_size, V vocab_size. With a mixture of experts, E num_experts and
T num_experts_per_tok; every expert is computed for every token, and most times nothing.
"""

import argparse
import json
import math
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: needs NumPy (on Debian and Ubuntu: apt install python3-numpy)", file=sys.stderr)
    sys.exit(77)

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def mix64(x):
    """The splitmix64 finaliser of x + the golden-ratio increment."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def fnv1a64(text):
    h = 14695981039346656037
    for byte in text.encode():
        h = ((h ^ byte) * 1099511628211) & MASK64
    return h


def philox4x32_10(counter, key):
    """counter: four and key: two 32-bit words. The counter's words are ints or uint64 arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def random_words(seed, stream, index0, index1=0):
    """The 64-bit words (a, b) of (seed, stream, index0, index1); index0 is an int or an array."""
    key = mix64(seed) ^ fnv1a64(stream)
    counter = (index0 & MASK32, index0 >> 32, index1 & MASK32, index1 >> 32)
    w0, w1, w2, w3 = philox4x32_10(counter, (key & MASK32, key >> 32))
    return w0 + (w1 << 32), w2 + (w3 << 32)


def normals(seed, stream, count):
    """Elements 0 .. count - 1 of a stream of standard normals."""
    a, b = random_words(seed, stream, np.arange(count, dtype=np.uint64))
    u1 = ((a >> 11).astype(np.float64) + 1) * 2.0**-53
    u2 = (b >> 11).astype(np.float64) * 2.0**-53
    return np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2)


def head_dim(c):
    return c.head_dim or c.hidden_size // c.num_heads


def parameter_table(c):
    """[(name, shape, std)] of the model; std None: all ones."""
    d = head_dim(c)
    q, kv = c.num_heads * d, c.num_kv_heads * d
    residual_std = 0.02 / math.sqrt(2 * c.num_layers)
    table = [("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), 0.02)]
    for l in range(c.num_layers):
        layer = [
            ("input_layernorm", (c.hidden_size,), None),
            ("self_attn.q_proj", (q, c.hidden_size), 0.02),
            ("self_attn.k_proj", (kv, c.hidden_size), 0.02),
            ("self_attn.v_proj", (kv, c.hidden_size), 0.02),
            ("self_attn.o_proj", (c.hidden_size, q), residual_std),
            ("post_attention_layernorm", (c.hidden_size,), None),
        ]
        if has_experts(c, l):
            width = c.moe_ffn_hidden_size or c.ffn_hidden_size
            layer.append(("mlp.gate", (c.num_experts, c.hidden_size), 0.02))
            mlps = [(f"mlp.experts.{e}.", width) for e in range(c.num_experts)]
            if c.num_shared_experts > 0:
                mlps.append(("mlp.shared_experts.", c.num_shared_experts * width))
        else:
            mlps = [("mlp.", c.ffn_hidden_size)]
        for prefix, width in mlps:
            layer += [(prefix + "gate_proj", (width, c.hidden_size), 0.02),
                      (prefix + "up_proj", (width, c.hidden_size), 0.02),
                      (prefix + "down_proj", (c.hidden_size, width), residual_std)]
        table += [(f"model.layers.{l}.{n}.weight", shape, std) for n, shape, std in layer]
    table.append(("model.norm.weight", (c.hidden_size,), None))
    if not c.tie_word_embeddings:
        table.append(("lm_head.weight", (c.vocab_size, c.hidden_size), 0.02))
    return table


def initial_weights(c):
    return {
        name: np.ones(shape) if std is None
        else std * normals(c.seed, name, math.prod(shape)).reshape(shape)
        for name, shape, std in parameter_table(c)
    }


def load_splits(c):
    """The training and the validation tokens."""
    if c.data.endswith(".bin"):
        tokens = np.fromfile(c.data, dtype={"uint16": "<u2", "uint32": "<u4"}[c.token_dtype])
    else:
        tokens = np.fromfile(c.data, dtype=np.uint8)
    if len(tokens) == 0 or tokens.max() >= c.vocab_size:
        sys.exit(f"error: {c.data} must hold tokens, all below vocab_size={c.vocab_size}")
    num_val = math.floor(c.val_fraction * len(tokens))
    return np.split(tokens.astype(np.int64), [len(tokens) - num_val])


def permutation(seed, epoch, j, num_windows):
    """Where position j of an epoch goes: a Feistel network that walks until it is in range."""
    h = 1
    while 4**h < num_windows:
        h += 1
    half = 2**h - 1
    while True:
        left, right = j >> h, j & half
        for rnd in range(4):
            f = random_words(seed, "data.order", right, 4 * epoch + rnd)[0]
            left, right = right, left ^ (f & half)
        j = (left << h) + right
        if j < num_windows:
            return j


def sample_start(c, i, n):
    """Where global sample i begins in the n training tokens."""
    if c.data_order == "sequential":
        return i * c.seq_len % n
    epoch, j = divmod(i, n // c.seq_len)
    offset = random_words(c.seed, "data.offset", epoch)[0] % n
    return permutation(c.seed, epoch, j, n // c.seq_len) * c.seq_len + offset


def windows(tokens, starts, seq_len):
    """(inputs, targets) [B, S] of the samples that begin at `starts`, wrapping at the end."""
    window = tokens[(np.array(starts)[:, None] + np.arange(seq_len + 1)) % len(tokens)]
    return window[:, :-1], window[:, 1:]


def rmsnorm(x, weight, eps):
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * rstd * weight, (x * rstd, rstd)


def rmsnorm_backward(dy, weight, saved):
    """Returns (dx, dweight)."""
    x_hat, rstd = saved
    d_hat = dy * weight
    dx = rstd * (d_hat - x_hat * np.mean(d_hat * x_hat, axis=-1, keepdims=True))
    return dx, np.sum(dy * x_hat, axis=(0, 1))


def weight_grad(dy, x):
    """dW [O, I] of y [B, S, O] = x [B, S, I] W^T."""
    return np.tensordot(dy, x, axes=([0, 1], [0, 1]))


def rope_angles(c):
    """[S, D / 2]"""
    d = head_dim(c)
    frequencies = c.rope_theta ** (-2 * np.arange(d // 2) / d)
    return np.outer(np.arange(c.seq_len), scale_frequencies(frequencies, c))


def scale_frequencies(frequencies, c):
    """Waves that a context longer than the original one stretches."""
    if c.rope_type == "default":
        return frequencies
    stretched = frequencies / c.rope_factor
    if c.rope_type == "linear":
        return stretched
    if c.rope_type == "yarn":
        share = yarn_share(c)
        return share * stretched + (1 - share) * frequencies
    wavelengths = 2 * np.pi / frequencies
    original = c.rope_original_max_position_embeddings
    smooth = (original / wavelengths - c.rope_low_freq_factor) / (
        c.rope_high_freq_factor - c.rope_low_freq_factor)
    blended = (1 - smooth) * stretched + smooth * frequencies
    blended = np.where(wavelengths > original / c.rope_low_freq_factor, stretched, blended)
    return np.where(wavelengths < original / c.rope_high_freq_factor, frequencies, blended)


def yarn_share(c):
    """[D / 2]: how much of each pair's wave is stretched."""
    d, original = head_dim(c), c.rope_original_max_position_embeddings

    def pair(times):
        return d / 2 * math.log(original / (times * 2 * math.pi)) / math.log(c.rope_theta)

    first, last = math.floor(pair(c.rope_beta_fast)), math.ceil(pair(c.rope_beta_slow))
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 * (first == last)
    return np.clip((np.arange(d // 2) - first) / (last - first), 0, 1)


def rope_amplitude(c):
    if c.rope_type != "yarn":
        return 1
    grown = 0.1 * math.log(c.rope_factor)
    if c.rope_mscale and c.rope_mscale_all_dim:
        return (c.rope_mscale * grown + 1) / (c.rope_mscale_all_dim * grown + 1)
    return grown + 1


def rotate(x, angles, amplitude):
    """x [..., S, D]; the gradient of a rotation is the rotation by the opposite angles."""
    x1, x2 = np.split(x, 2, axis=-1)
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def split_heads(x, num_heads):
    """[B, S, heads * D] -> [B, heads, S, D]"""
    b, s, _ = x.shape
    return x.reshape(b, s, num_heads, -1).swapaxes(1, 2)


def merge_heads(x):
    """[B, heads, S, D] -> [B, S, heads * D]"""
    b, _, s, _ = x.shape
    return x.swapaxes(1, 2).reshape(b, s, -1)


def attention(x, p, prefix, c):
    angles, amplitude = rope_angles(c), rope_amplitude(c)
    q = rotate(split_heads(x @ p[prefix + "q_proj.weight"].T, c.num_heads), angles, amplitude)
    k = rotate(split_heads(x @ p[prefix + "k_proj.weight"].T, c.num_kv_heads), angles, amplitude)
    v = split_heads(x @ p[prefix + "v_proj.weight"].T, c.num_kv_heads)
    # Query head j reads kv head j // G: the heads become [K, G], keys and values [K, 1].
    b, _, s, d = q.shape
    q = q.reshape(b, c.num_kv_heads, -1, s, d)
    k, v = k[:, :, None], v[:, :, None]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(d)  # [B, K, G, S, S]
    scores = np.where(np.tril(np.ones((s, s), dtype=bool)), scores, -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    out = merge_heads((probs @ v).reshape(b, c.num_heads, s, d))
    return out @ p[prefix + "o_proj.weight"].T, (x, q, k, v, probs, out)


def attention_backward(dy, p, prefix, saved, c, grads):
    x, q, k, v, probs, out = saved
    b, _, _, s, d = q.shape
    grads[prefix + "o_proj.weight"] = weight_grad(dy, out)
    dout = split_heads(dy @ p[prefix + "o_proj.weight"], c.num_heads).reshape(q.shape)
    dv = (probs.swapaxes(-1, -2) @ dout).sum(axis=2)  # every query head of the group adds to it
    dprobs = dout @ v.swapaxes(-1, -2)
    dscores = probs * (dprobs - np.sum(dprobs * probs, axis=-1, keepdims=True)) / math.sqrt(d)
    angles, amplitude = rope_angles(c), rope_amplitude(c)
    dq = rotate((dscores @ k).reshape(b, c.num_heads, s, d), -angles, amplitude)
    dk = rotate((dscores.swapaxes(-1, -2) @ q).sum(axis=2), -angles, amplitude)
    dx = 0
    for name, d_heads in (("q_proj", dq), ("k_proj", dk), ("v_proj", dv)):
        d_flat = merge_heads(d_heads)
        grads[prefix + name + ".weight"] = weight_grad(d_flat, x)
        dx = dx + d_flat @ p[prefix + name + ".weight"]
    return dx


def mlp(x, p, prefix):
    gate, up = x @ p[prefix + "gate_proj.weight"].T, x @ p[prefix + "up_proj.weight"].T
    sigmoid = 1 / (1 + np.exp(-gate))
    act = gate * sigmoid * up
    return act @ p[prefix + "down_proj.weight"].T, (x, gate, up, sigmoid, act)


def mlp_backward(dy, p, prefix, saved, grads):
    x, gate, up, sigmoid, act = saved
    grads[prefix + "down_proj.weight"] = weight_grad(dy, act)
    dact = dy @ p[prefix + "down_proj.weight"]
    dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dact * gate * sigmoid
    grads[prefix + "gate_proj.weight"] = weight_grad(dgate, x)
    grads[prefix + "up_proj.weight"] = weight_grad(dup, x)
    return dgate @ p[prefix + "gate_proj.weight"] + dup @ p[prefix + "up_proj.weight"]


def has_experts(c, layer):
    return c.num_experts > 0 and layer >= c.first_dense_layers


class Loads:
    """What a layer's router knows of the steps before."""

    def __init__(self, c):
        self.bias = np.zeros(c.num_experts)
        self.before = np.zeros(c.num_experts)  # choices of the step before
        self.now = np.zeros(c.num_experts)
        self.dropped = 0
        self.entropy = 0.0

    def end_step(self, c):
        self.before = self.now
        if c.balance == "bias":
            self.bias += c.bias_update_rate * np.sign(self.now.mean() - self.now)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def choose(scores, c):
    """The experts of each token [B, S, T], by scores [B, S, E]."""
    if c.route_nodes > 0:
        nodes = scores.reshape(scores.shape[:2] + (c.expert_nodes, -1))
        counted = math.ceil(c.num_experts_per_tok / c.route_nodes)
        of_nodes = -np.sort(-nodes, axis=-1)[..., :counted].sum(axis=-1)
        best = np.argsort(-of_nodes, axis=-1, kind="stable")[..., :c.route_nodes]
        allowed = np.zeros(of_nodes.shape, dtype=bool)
        np.put_along_axis(allowed, best, True, axis=-1)
        scores = np.where(allowed[..., None], nodes, -np.inf).reshape(scores.shape)
    return np.argsort(-scores, axis=-1, kind="stable")[..., :c.num_experts_per_tok]


def keep_to_capacity(choices, c):
    """Which choices [B, S, T] an expert has room for: in each sample, the first ones."""
    kept = np.ones(choices.shape, dtype=bool)
    if c.capacity_factor == 0:
        return kept
    capacity = math.ceil(c.capacity_factor * (choices[0].size / c.num_experts))
    for sample, keep in zip(choices, kept):
        taken = [0] * c.num_experts
        for s, t in np.ndindex(*sample.shape):
            keep[s, t] = taken[sample[s, t]] < capacity
            taken[sample[s, t]] += 1
    return kept


def mixture(x, p, prefix, c, loads):
    """Returns (y, loss of the balance, saved)."""
    logits = x @ p[prefix + "gate.weight"].T  # [B, S, E]
    scores = softmax(logits) if c.router_score == "softmax" else 1 / (1 + np.exp(-logits))
    choices = choose(scores + loads.bias, c)
    kept = keep_to_capacity(choices, c)
    chosen = choices[..., None] == np.arange(c.num_experts)  # [B, S, T, E]
    loads.now = chosen.sum(axis=(0, 1, 2)).astype(float)
    loads.dropped = int((~kept).sum())
    shares = scores / scores.sum(axis=-1, keepdims=True)
    loads.entropy = -np.sum(shares * np.log(shares), axis=-1).mean()
    gates = np.take_along_axis(scores, choices, axis=-1)
    total = gates.sum(axis=-1, keepdims=True) if c.norm_topk_prob else 1.0
    gates = c.routed_scaling_factor * gates / total
    factors = ((gates * kept)[..., None] * chosen).sum(axis=2)  # [B, S, E]
    y, experts = 0, []
    for e in range(c.num_experts):
        out, saved = mlp(x, p, f"{prefix}experts.{e}.")
        y = y + factors[..., e, None] * out
        experts.append((out, saved))
    shared = None
    if c.num_shared_experts > 0:
        out, shared = mlp(x, p, prefix + "shared_experts.")
        y = y + out
    loss, dscores, dlogits = balance_losses(scores, logits, chosen, c, loads)
    return y, loss, (x, scores, chosen, kept, gates, total, factors, experts, shared, dscores,
                     dlogits)


def balance_losses(scores, logits, chosen, c, loads):
    """Returns (loss, its gradients through the scores and directly through the logits)."""
    b, s, _ = scores.shape
    loss, dscores, dlogits = 0.0, np.zeros(scores.shape), np.zeros(scores.shape)
    if c.balance in ("sample", "batch"):
        # The share of the choices: of each sample, or of the batch before.
        f = (chosen.sum(axis=(1, 2)) / (s * c.num_experts_per_tok) if c.balance == "sample"
             else loads.before / (b * s * c.num_experts_per_tok) * np.ones((b, 1)))
        sums = scores.sum(axis=-1, keepdims=True)
        probs = scores / sums
        dprobs = c.balance_coef * c.num_experts / (b * s) * f[:, None, :] * np.ones(scores.shape)
        loss += np.sum(dprobs * probs)
        dscores += dprobs / sums - np.sum(dprobs * probs, axis=-1, keepdims=True) / sums
        if c.router_score == "softmax":
            dscores = dprobs  # which add up to 1 already
    if c.router_z_loss_coef > 0:
        top = logits.max(axis=-1, keepdims=True)
        z = top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
        loss += c.router_z_loss_coef * np.mean(z * z)
        dlogits += c.router_z_loss_coef * 2 * z / (b * s) * softmax(logits)
    return loss, dscores, dlogits


def mixture_backward(dy, p, prefix, saved, c, grads):
    x, scores, chosen, kept, gates, total, factors, experts, shared, dscores, dlogits = saved
    dx, dfactors = 0, []
    for e, (out, of_expert) in enumerate(experts):
        dx = dx + mlp_backward(dy * factors[..., e, None], p, f"{prefix}experts.{e}.", of_expert,
                               grads)
        dfactors.append(np.sum(dy * out, axis=-1))
    if shared is not None:
        dx = dx + mlp_backward(dy, p, prefix + "shared_experts.", shared, grads)
    dgates = kept * (chosen * np.stack(dfactors, axis=-1)[:, :, None, :]).sum(axis=-1)
    dpicked = c.routed_scaling_factor * dgates
    if c.norm_topk_prob:
        dpicked = (dpicked - np.sum(dgates * gates, axis=-1, keepdims=True)) / total
    dscores = dscores + (dpicked[..., None] * chosen).sum(axis=2)
    if c.router_score == "softmax":
        through = scores * (dscores - np.sum(dscores * scores, axis=-1, keepdims=True))
    else:
        through = dscores * scores * (1 - scores)
    dlogits = dlogits + through
    grads[prefix + "gate.weight"] = weight_grad(dlogits, x)
    return dx + dlogits @ p[prefix + "gate.weight"]


def forward(p, inputs, targets, c, loads):
    """Returns (loss, loss of the routers' balance, what backward() needs)."""
    saved, balance = [], 0.0
    x = p["model.embed_tokens.weight"][inputs]  # [B, S, H]
    for l in range(c.num_layers):
        prefix = f"model.layers.{l}."
        y, norm1 = rmsnorm(x, p[prefix + "input_layernorm.weight"], c.rms_norm_eps)
        y, attn = attention(y, p, prefix + "self_attn.", c)
        x = x + y
        y, norm2 = rmsnorm(x, p[prefix + "post_attention_layernorm.weight"], c.rms_norm_eps)
        if has_experts(c, l):
            y, of_layer, ffn = mixture(y, p, prefix + "mlp.", c, loads[l])
            balance += of_layer
        else:
            y, ffn = mlp(y, p, prefix + "mlp.")
        x = x + y
        saved.append((norm1, attn, norm2, ffn))
    y, norm = rmsnorm(x, p["model.norm.weight"], c.rms_norm_eps)
    logits = y @ p[head_name(c)].T  # [B, S, V]
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -np.mean(np.take_along_axis(log_probs, targets[..., None], axis=-1))
    return loss, balance, (inputs, targets, saved, y, norm, log_probs)


def backward(p, state, c):
    """Returns {name: gradient of both losses}."""
    inputs, targets, saved, y, norm, log_probs = state
    grads = {}
    dlogits = np.exp(log_probs)
    dlogits -= np.arange(c.vocab_size) == targets[..., None]
    dlogits /= targets.size
    dhead = weight_grad(dlogits, y)
    dx, grads["model.norm.weight"] = rmsnorm_backward(
        dlogits @ p[head_name(c)], p["model.norm.weight"], norm)
    for l in reversed(range(c.num_layers)):
        prefix = f"model.layers.{l}."
        norm1, attn, norm2, ffn = saved[l]
        name = prefix + "post_attention_layernorm.weight"
        dy = (mixture_backward(dx, p, prefix + "mlp.", ffn, c, grads) if has_experts(c, l)
              else mlp_backward(dx, p, prefix + "mlp.", ffn, grads))
        dy, grads[name] = rmsnorm_backward(dy, p[name], norm2)
        dx = dx + dy
        name = prefix + "input_layernorm.weight"
        dy = attention_backward(dx, p, prefix + "self_attn.", attn, c, grads)
        dy, grads[name] = rmsnorm_backward(dy, p[name], norm1)
        dx = dx + dy
    dembedding = np.zeros((c.vocab_size, c.hidden_size))
    np.add.at(dembedding, inputs, dx)
    grads["model.embed_tokens.weight"] = dembedding
    grads[head_name(c)] = grads.get(head_name(c), 0) + dhead  # a tied weight gets both terms
    return grads


def head_name(c):
    return "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"


def learning_rate(c, step):
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    q = min(1.0, (step - c.warmup_steps) / max(1, c.steps - c.warmup_steps))
    lr_min = c.min_lr_ratio * c.lr
    return lr_min + (c.lr - lr_min) * (1 + math.cos(math.pi * q)) / 2


def adamw(p, grads, moments, lr, t, c):
    for name, g in grads.items():
        m, v = moments[name]
        m = c.adam_beta1 * m + (1 - c.adam_beta1) * g
        v = c.adam_beta2 * v + (1 - c.adam_beta2) * g * g
        moments[name] = (m, v)
        decay = c.weight_decay if g.ndim >= 2 else 0.0
        m_hat, v_hat = m / (1 - c.adam_beta1**t), v / (1 - c.adam_beta2**t)
        p[name] = p[name] * (1 - lr * decay) - lr * m_hat / (np.sqrt(v_hat) + c.adam_eps)


def train(c):
    """Yields one record per step."""
    train_tokens, val_tokens = load_splits(c)
    if len(train_tokens) < c.seq_len:
        sys.exit(f"error: {len(train_tokens)} training tokens; seq_len={c.seq_len} needs as many")
    p = initial_weights(c)
    moments = {name: (0.0, 0.0) for name in p}
    loads = [Loads(c) for _ in range(c.num_layers)]
    # Micro-batches only cut the global batch into pieces; here it is one piece.
    batch = c.micro_batch_size * c.grad_acc_steps
    num_val = min(c.eval_samples, (len(val_tokens) - 1) // c.seq_len)
    for step in range(c.steps):
        samples = range(step * batch, (step + 1) * batch)
        starts = [sample_start(c, i, len(train_tokens)) for i in samples]
        loss, balance, state = forward(p, *windows(train_tokens, starts, c.seq_len), c, loads)
        grads = backward(p, state, c)
        norm = math.sqrt(sum(np.sum(g * g) for g in grads.values()))
        record = {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": learning_rate(c, step)}
        if math.isfinite(norm):
            scale = min(1.0, c.grad_clip / norm) if norm > 0 else 1.0
            grads = {name: g * scale for name, g in grads.items()}
            adamw(p, grads, moments, record["lr"], step + 1, c)
        if c.num_experts > 0:
            record["expert_loss"] = balance
            record["experts"] = [
                {"layer": l, "tokens": of_layer.now.tolist(), "dropped": of_layer.dropped,
                 "max_over_mean": of_layer.now.max() / of_layer.now.mean(),
                 "entropy": of_layer.entropy}
                for l, of_layer in enumerate(loads) if has_experts(c, l)]
        for of_layer in loads:
            of_layer.end_step(c)
        if num_val > 0:
            starts = [i * c.seq_len for i in range(num_val)]
            record["val_loss"] = forward(p, *windows(val_tokens, starts, c.seq_len), c, loads)[0]
        yield record


def check(ok, message):
    if not ok:
        sys.exit(f"error: self-test: {message}")


def check_random():
    pi_digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    known = [  # from the Random123 distribution
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi_digits, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for counter, key, want in known:
        check(philox4x32_10(counter, key) == want, f"philox4x32_10({counter}, {key})")
        arrays = tuple(np.array([word], dtype=np.uint64) for word in counter)
        check(philox4x32_10(arrays, key) == want, f"philox4x32_10 on arrays, {counter}")
    check(mix64(0) == 0xE220A8397B1DCDAF, "mix64(0) is splitmix64's first output of seed 0")
    check(fnv1a64("a") == 0xAF63DC4C8601EC8C, 'fnv1a64("a")')
    check(fnv1a64("foobar") == 0x85944171F73967E8, 'fnv1a64("foobar")')
    z = normals(7, "test", 100000)  # five standard errors
    check(abs(z.mean()) < 0.016 and abs(z.var() - 1) < 0.023, f"normals: {z.mean()}, {z.var()}")


def check_permutation():
    for num_windows in (1, 2, 3, 4, 5, 16, 17, 61):
        orders = [[permutation(5, e, j, num_windows) for j in range(num_windows)] for e in (0, 1)]
        for order in orders:
            check(sorted(order) == list(range(num_windows)), f"not a permutation: {order}")
        check(num_windows < 16 or orders[0] != orders[1], "two epochs in the same order")


def check_gradients(tie_word_embeddings, num_kv_heads, **experts):
    """Central differences, error O(eps^2) truncation + O(1e-16 / eps) rounding."""
    eps, tolerance = 1e-5, 1e-7
    c = argparse.Namespace(
        hidden_size=12, num_layers=2, num_heads=3, num_kv_heads=num_kv_heads, ffn_hidden_size=10,
        vocab_size=11, rope_theta=100.0, rms_norm_eps=1e-3, seq_len=5, seed=3,
        head_dim=2 * num_kv_heads, rope_type="linear", rope_factor=2.0,
        tie_word_embeddings=tie_word_embeddings,
        **{**dict(num_experts=0, num_experts_per_tok=2, moe_ffn_hidden_size=6,
                  num_shared_experts=1, first_dense_layers=0, router_score="softmax",
                  norm_topk_prob=False, routed_scaling_factor=1.5, expert_nodes=1, route_nodes=0,
                  balance="none", balance_coef=0.3, router_z_loss_coef=0.2, capacity_factor=0),
           **experts})
    # Weights larger than a run starts with: attention is then far from uniform.
    p = {name: w + 0.4 * normals(4, name, w.size).reshape(w.shape)
         for name, w in initial_weights(c).items()}
    inputs, targets = windows(np.arange(40) * 7 % 11, [0, 13], c.seq_len)
    loads = [Loads(c) for _ in range(c.num_layers)]
    for l, of_layer in enumerate(loads):
        of_layer.before = np.arange(c.num_experts) + float(l)

    def loss():
        return sum(forward(p, inputs, targets, c, loads)[:2])

    grads = backward(p, forward(p, inputs, targets, c, loads)[2], c)
    check(grads.keys() == p.keys(), "a parameter has no gradient")
    for name, g in grads.items():
        for index in random_words(9, name, np.arange(6, dtype=np.uint64))[0] % g.size:
            weight = p[name].reshape(-1)
            kept = weight[index]
            weight[index] = kept + eps
            plus = loss()
            weight[index] = kept - eps
            minus = loss()
            weight[index] = kept
            got, want = g.reshape(-1)[index], (plus - minus) / (2 * eps)
            error = abs(got - want) / (np.abs(g).max() or 1)  # all 0: an expert nobody has chosen
            check(error <= tolerance, f"{name}[{index}]: gradient {got}, finite difference {want}")


def self_test():
    check_random()
    check_permutation()
    check_gradients(tie_word_embeddings=False, num_kv_heads=3)
    check_gradients(tie_word_embeddings=True, num_kv_heads=1)
    check_gradients(False, 1, num_experts=4, balance="sample", capacity_factor=0.8)
    check_gradients(False, 1, num_experts=8, balance="batch", norm_topk_prob=True,
                    first_dense_layers=1, expert_nodes=4, route_nodes=2)
    check_gradients(False, 1, num_experts=4, balance="sample", router_score="sigmoid")
    check_gradients(False, 1, num_experts=4, norm_topk_prob=True, router_score="sigmoid",
                    balance="bias", router_z_loss_coef=0)
    print("self-test passed")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("hidden_size num_layers num_heads num_kv_heads ffn_hidden_size vocab_size steps "
                 "seq_len micro_batch_size grad_acc_steps warmup_steps seed").split():
        parser.add_argument("--" + name, type=int, required=True)
    for name in ("rope_theta rms_norm_eps lr min_lr_ratio adam_beta1 adam_beta2 adam_eps "
                 "weight_decay grad_clip val_fraction").split():
        parser.add_argument("--" + name, type=float, required=True)
    parser.add_argument("--head_dim", type=int, default=0)
    parser.add_argument("--rope_type", choices=("default", "linear", "llama3", "yarn"),
                        default="default")
    for name, default in (("rope_beta_fast", 32), ("rope_beta_slow", 1), ("rope_mscale", 0),
                          ("rope_mscale_all_dim", 0)):
        parser.add_argument("--" + name, type=float, default=default)
    for name in "rope_factor rope_low_freq_factor rope_high_freq_factor".split():
        parser.add_argument("--" + name, type=float)
    parser.add_argument("--rope_original_max_position_embeddings", type=int)
    parser.add_argument("--tie_word_embeddings", action="store_true")
    parser.add_argument("--data", required=True)
    parser.add_argument("--token_dtype", choices=("uint16", "uint32"), default="uint16")
    parser.add_argument("--data_order", choices=("sequential", "shuffled"), required=True)
    parser.add_argument("--eval_samples", type=int, default=0)
    for name, default in (("num_experts", 0), ("num_experts_per_tok", 2),
                          ("moe_ffn_hidden_size", 0), ("num_shared_experts", 0),
                          ("first_dense_layers", 0), ("expert_nodes", 1), ("route_nodes", 0)):
        parser.add_argument("--" + name, type=int, default=default)
    for name, default in (("routed_scaling_factor", 1), ("balance_coef", 0.01),
                          ("router_z_loss_coef", 0), ("bias_update_rate", 0.001),
                          ("capacity_factor", 0)):
        parser.add_argument("--" + name, type=float, default=default)
    parser.add_argument("--router_score", choices=("softmax", "sigmoid"), default="softmax")
    parser.add_argument("--norm_topk_prob", action="store_true")
    parser.add_argument("--balance", choices=("none", "sample", "batch", "bias"), default="none")
    return parser.parse_args()


def main():
    if sys.argv[1:] == ["--self_test"]:
        return self_test()
    for record in train(parse_args()):
        # repr, which json uses, keeps every bit of a float64: 17 digits where they are needed.
        print(json.dumps({key: x if isinstance(x, list) or math.isfinite(x) else str(x)
                          for key, x in record.items()}))


if __name__ == "__main__":
    main()
