"""Bodies of honest solutions of the built-in kernel problems with other operators of torch than the reference's."""

from __future__ import annotations

# Problem -> arguments of forward, and its body.
TORCH = {
    "leaky_relu": ("x", "return torch.maximum(x, self.slope * x)"),
    "gelu_tanh": ("x", "return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))"),
    "silu_gate": ("gate, x", "return gate * torch.sigmoid(gate) * x"),
    "softplus": ("x", "return torch.logaddexp(x, x.new_zeros(()))"),
    "hardswish": ("x", "return x * torch.clamp(x + 3, 0, 6) / 6"),
    "mish": ("x", "return x * torch.tanh(torch.logaddexp(x, x.new_zeros(())))"),
    "elu": ("x", "return torch.where(x > 0, x, self.alpha * torch.expm1(x))"),
    "affine_clamp": (
        "x",
        "x = x * self.scale + self.shift\nreturn torch.where(x > 1, 1.0, torch.where(x < -1, -1.0, x))",
    ),
    "rotary_embedding": (
        "x, cosine, sine",
        """
        half = cosine.shape[1]
        out = torch.empty_like(x)
        torch.mul(x[:, :half], cosine, out=out[:, :half])
        out[:, :half].addcmul_(x[:, half:], sine, value=-1)
        torch.mul(x[:, half:], cosine, out=out[:, half:])
        out[:, half:].addcmul_(x[:, :half], sine)
        return out""",
    ),
    "binary_cross_entropy": (
        "logits, targets",
        "return torch.relu(logits) - logits * targets + torch.log1p(torch.exp(-logits.abs()))",
    ),
    "lerp_float64": ("start, end, weight", "return torch.addcmul(start, weight, end - start)"),
    "integer_hash": (
        "x",
        """
        y = x >> 33
        y ^= x
        y *= -7046029254386353131
        return y ^ (y >> 29)""",
    ),
    "softmax": (
        "x",
        "x = torch.exp(x - x.amax(dim=1, keepdim=True))\nreturn x.div_(x.sum(dim=1, keepdim=True))",
    ),
    "logsumexp": (
        "x",
        "top = x.amax(dim=1, keepdim=True)\nreturn torch.log(torch.exp(x - top).sum(dim=1)) + top[:, 0]",
    ),
    "layer_norm": (
        "x, weight, bias",
        """
        x = x - x.mean(dim=1, keepdim=True)
        scale = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + 1e-5)
        return torch.addcmul(bias, x.mul_(scale), weight)""",
    ),
    "rms_norm": (
        "x, weight",
        "square = torch.linalg.vector_norm(x, dim=1, keepdim=True) ** 2 / x.shape[1]\n"
        "return x / torch.sqrt(square + self.epsilon) * weight",
    ),
    "column_variance": (
        "x",
        "x = x - x.mean(dim=0)\nreturn (x * x).sum(dim=0) / (x.shape[0] - 1)",
    ),
    "cumulative_sum": (
        "x",
        """
        out = torch.empty_like(x)
        total = torch.zeros_like(x[:, 0], dtype=torch.float64)
        for column in range(x.shape[1]):
            total += x[:, column]
            out[:, column] = total
        return out""",
    ),
    "count_above": ("x", "return torch.count_nonzero(x > self.threshold, dim=1)"),
    "cosine_similarity": (
        "a, b",
        """
        lengths = torch.linalg.vector_norm(a, dim=1), torch.linalg.vector_norm(b, dim=1)
        return (a * b).sum(dim=1) / (lengths[0].clamp(min=1e-8) * lengths[1].clamp(min=1e-8))""",
    ),
    "bincount": (
        "x",
        "counts = torch.zeros(self.bins, dtype=torch.int64)\nreturn counts.scatter_add_(0, x, torch.ones_like(x))",
    ),
    "vector_norm_float64": ("x", "return torch.sqrt((x * x).sum(dim=1))"),
    "matmul": (
        "a, b",
        """
        out = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            out.addcmul_(a[:, k : k + 1], b[k])
        return out""",
    ),
    "transposed_matmul": (
        "a, b",
        """
        out = torch.zeros(a.shape[1], b.shape[1])
        for k in range(a.shape[0]):
            out.addcmul_(a[k][:, None], b[k])
        return out""",
    ),
    "batched_matmul": (
        "a, b",
        """
        out = torch.zeros(a.shape[0], a.shape[1], b.shape[2])
        for k in range(a.shape[2]):
            out.addcmul_(a[:, :, k : k + 1], b[:, k : k + 1])
        return out""",
    ),
    "matrix_vector": ("a, v", "return (a * v).sum(dim=1)"),
    "diagonal_matmul": ("diagonal, b", "return diagonal[:, None] * b"),
    "triangular_matmul": (
        "a, b",
        """
        out, block = torch.zeros_like(a), 64
        for start in range(0, a.shape[0], block):
            end = start + block
            out[start:end, :end] = torch.tril(a[start:end, :end], start) @ torch.tril(b[:end, :end])
        return torch.tril(out)""",
    ),
    "gram_float64": (
        "x",
        """
        half = x.shape[1] // 2
        out = torch.empty(x.shape[1], x.shape[1], dtype=x.dtype)
        out[:half] = x[:, :half].T @ x
        out[half:, half:] = x[:, half:].T @ x[:, half:]
        out[half:, :half] = out[:half, half:].T
        return out""",
    ),
    "low_rank": ("x, left, right", "return (x @ left) @ right"),
    "tridiagonal_matmul": (
        "lower, middle, upper, b",
        """
        out = middle[:, None] * b
        out[1:].addcmul_(lower[:, None], b[:-1])
        out[:-1].addcmul_(upper[:, None], b[1:])
        return out""",
    ),
    "integer_matmul": ("a, b", "return (a.double() @ b.double()).long()"),
    "linear_gelu": (
        "x",
        """
        x = torch.addmm(self.linear.bias, x, self.linear.weight.T)
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))""",
    ),
    "swiglu_mlp": (
        "x, gate, up, down",
        "gate = x @ gate.T\nreturn (gate * torch.sigmoid(gate) * (x @ up.T)) @ down.T",
    ),
    "causal_attention": (
        "query, key, value",
        """
        out, block = torch.empty_like(query), 32
        for start in range(0, query.shape[1], block):
            end = min(start + block, query.shape[1])
            scores = query[:, start:end] @ key[:, :end].transpose(1, 2) * query.shape[2] ** -0.5
            future = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
            out[:, start:end] = torch.softmax(scores.masked_fill_(future, float("-inf")), dim=-1) @ value[:, :end]
        return out""",
    ),
    "residual_norm_gelu": (
        "x, residual, weight, bias",
        """
        x = x + residual
        x = x - x.mean(dim=1, keepdim=True)
        x = x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + 1e-5) * weight + bias
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))""",
    ),
    "cross_entropy": (
        "logits, targets",
        "right = logits.gather(1, targets[:, None])[:, 0]\nreturn (torch.logsumexp(logits, dim=1) - right).mean()",
    ),
    "conv_relu": (
        "x",
        """
        columns = torch.nn.functional.unfold(x, 3, padding=1)
        weight = self.convolution.weight.flatten(1)
        out = (weight @ columns).reshape(x.shape[0], -1, *x.shape[2:])
        return torch.relu(out + self.convolution.bias[:, None, None])""",
    ),
    "depthwise_conv_silu": (
        "x",
        """
        length, weight = x.shape[2], self.convolution.weight
        out = self.convolution.bias[:, None] + weight[:, 0, 3:] * x
        for lag in range(1, min(4, length)):
            out[..., lag:] += weight[:, 0, 3 - lag, None] * x[..., : length - lag]
        return out * torch.sigmoid(out)""",
    ),
    "gru_cell": (
        "x, state",
        """
        cell = self.cell
        given = torch.addmm(cell.bias_ih, x, cell.weight_ih.T).chunk(3, dim=1)
        kept = torch.addmm(cell.bias_hh, state, cell.weight_hh.T).chunk(3, dim=1)
        reset, update = torch.sigmoid(given[0] + kept[0]), torch.sigmoid(given[1] + kept[1])
        return torch.lerp(torch.tanh(given[2] + reset * kept[2]), state, update)""",
    ),
    "linear_recurrence": (
        "a, b",
        """
        states = b.clone()
        for step in range(1, a.shape[1]):
            states[:, step].addcmul_(a[:, step], states[:, step - 1])
        return states""",
    ),
    "linear_attention": (
        "query, key, value",
        """
        query, key = torch.nn.functional.elu(query) + 1, torch.nn.functional.elu(key) + 1
        return query @ (key.transpose(1, 2) @ value) / (query @ key.sum(dim=1)[:, :, None])""",
    ),
}
