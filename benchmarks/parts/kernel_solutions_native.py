"""Bodies of honest solutions of the built-in kernel problems in C++.

A line ``PARALLEL;`` stands before a loop whose turns are independent.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Native:
    """A forward pass in C++: ``arrays`` and ``numbers`` as "NAME:TYPE=PYTHON EXPRESSION", separated by ";"."""

    arrays: str
    numbers: str
    out: str  # Python expression of the tensor for the output, and its type in C++
    body: str
    type: str = "float"


def elementwise(
    expression: str, arguments: str = "x", numbers: str = "", prelude: str = "", kind: str = "float"
) -> Native:
    """A loop over all elements; in ``expression`` the arguments stand for theirs."""
    names = arguments.split(", ")
    loads = " ".join(f"const {kind} {name} = {name}_[i];" for name in names)
    return Native(
        arrays="; ".join(f"{name}_:{kind}={name}" for name in names),
        numbers=f"count:int64_t={names[0]}.numel(); {numbers}",
        out=f"torch.empty_like({names[0]})",
        body="PARALLEL;\nfor (int64_t i = 0; i < count; i++) {\n"
        f"    {loads} {prelude}\n    out[i] = {expression};\n}}",
        type=kind,
    )


def rowwise(
    body: str, arrays: str = "x:float=x", out: str = "torch.empty_like(x)", numbers: str = "", kind: str = "float"
) -> Native:
    """A loop over the rows of ``x`` whose first lines set pointers ``in`` and ``to`` to the row."""
    first, element = arrays.split("=")[0].split(":")
    width = "columns" if "empty_like" in out else "1"
    return Native(
        arrays=arrays,
        numbers=f"rows:int64_t={first}.shape[0]; columns:int64_t={first}.shape[1]; {numbers}",
        out=out,
        body="PARALLEL;\nfor (int64_t row = 0; row < rows; row++) {\n"
        f"    const {element}* in = {first} + row * columns;\n    {kind}* to = out + row * {width};\n"
        + textwrap.indent(textwrap.dedent(body).strip(), "    ")
        + "\n}",
        type=kind,
    )


def product(
    kind: str = "float", a: str = "a[i * inner + k]", left: str = "a.shape[0]", inner: str = "a.shape[1]"
) -> Native:
    """A product of ``a`` and ``b`` in the order of rows, inner, columns."""
    return Native(
        arrays=f"a:{kind}=a; b:{kind}=b",
        numbers=f"rows:int64_t={left}; inner:int64_t={inner}; columns:int64_t=b.shape[1]",
        out=f"torch.empty({left}, b.shape[1], dtype=a.dtype)",
        body=f"""
        PARALLEL;
        for (int64_t i = 0; i < rows; i++) {{
            {kind}* to = out + i * columns;
            std::fill(to, to + columns, {kind}(0));
            for (int64_t k = 0; k < inner; k++) {{
                const {kind} factor = {a};
                for (int64_t j = 0; j < columns; j++) to[j] += factor * b[k * columns + j];
            }}
        }}""",
        type=kind,
    )


NORM = """
double sum = 0, squares = 0;
for (int64_t j = 0; j < columns; j++) { to[j] = VALUE; sum += to[j]; }
const float mean = sum / columns;
for (int64_t j = 0; j < columns; j++) squares += double(to[j] - mean) * (to[j] - mean);
const float scale = 1 / std::sqrt(float(squares / columns) + 1e-5f);
for (int64_t j = 0; j < columns; j++) { const float y = (to[j] - mean) * scale * weight[j] + bias[j]; to[j] = RESULT; }
"""
EXPONENTIALS = """
float top = in[0];
for (int64_t j = 1; j < columns; j++) top = std::max(top, in[j]);
double sum = 0;
"""
GELU = "0.5f * y * (1 + std::erf(y * 0.70710678f))"
SOFTPLUS = "const float s = x > 20 ? x : std::log1p(std::exp(x));"
NATIVE = {
    "leaky_relu": elementwise("x > 0 ? x : slope * x", numbers="slope:float=self.slope"),
    "gelu_tanh": elementwise("0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)))"),
    "silu_gate": elementwise("gate / (1 + std::exp(-gate)) * x", "gate, x"),
    "softplus": elementwise("s", prelude=SOFTPLUS),
    "hardswish": elementwise("x * std::min(std::max(x + 3, 0.0f), 6.0f) / 6"),
    "mish": elementwise("x * std::tanh(s)", prelude=SOFTPLUS),
    "elu": elementwise("x > 0 ? x : alpha * std::expm1(x)", numbers="alpha:float=self.alpha"),
    "affine_clamp": elementwise(
        "std::min(std::max(x * scale + shift, -1.0f), 1.0f)", numbers="scale:float=self.scale; shift:float=self.shift"
    ),
    "binary_cross_entropy": elementwise("std::max(x, 0.0f) - x * t + std::log1p(std::exp(-std::abs(x)))", "x, t"),
    "lerp_float64": elementwise("a + w * (b - a)", "a, b, w", kind="double"),
    "integer_hash": elementwise(
        "z ^ (z >> 29)",
        prelude="const int64_t z = int64_t(uint64_t(x ^ (x >> 33)) * uint64_t(-7046029254386353131));",
        kind="int64_t",
    ),
    "rotary_embedding": Native(
        arrays="x:float=x; cosine:float=cosine; sine:float=sine",
        numbers="rows:int64_t=x.shape[0]; half:int64_t=cosine.shape[1]",
        out="torch.empty_like(x)",
        body="""
        PARALLEL;
        for (int64_t row = 0; row < rows; row++) {
            const float *left = x + row * 2 * half, *right = left + half;
            const float *c = cosine + row * half, *s = sine + row * half;
            float* to = out + row * 2 * half;
            for (int64_t j = 0; j < half; j++) {
                to[j] = left[j] * c[j] - right[j] * s[j];
                to[half + j] = right[j] * c[j] + left[j] * s[j];
            }
        }""",
    ),
    "softmax": rowwise(
        EXPONENTIALS
        + "for (int64_t j = 0; j < columns; j++) sum += to[j] = std::exp(in[j] - top);\n"
        + "const float scale = 1 / sum;\nfor (int64_t j = 0; j < columns; j++) to[j] *= scale;"
    ),
    "logsumexp": rowwise(
        EXPONENTIALS
        + "for (int64_t j = 0; j < columns; j++) sum += std::exp(in[j] - top);\n*to = top + std::log(sum);",
        out="torch.empty(x.shape[0])",
    ),
    "layer_norm": rowwise(
        NORM.replace("VALUE", "in[j]").replace("RESULT", "y"), "x:float=x; weight:float=weight; bias:float=bias"
    ),
    "rms_norm": rowwise(
        """
        double squares = 0;
        for (int64_t j = 0; j < columns; j++) squares += double(in[j]) * in[j];
        const float scale = 1 / std::sqrt(float(squares / columns) + epsilon);
        for (int64_t j = 0; j < columns; j++) to[j] = in[j] * scale * weight[j];""",
        "x:float=x; weight:float=weight",
        numbers="epsilon:float=self.epsilon",
    ),
    "column_variance": Native(
        arrays="x:float=x",
        numbers="rows:int64_t=x.shape[0]; columns:int64_t=x.shape[1]",
        out="torch.empty(x.shape[1])",
        body="""
        PARALLEL;
        for (int64_t start = 0; start < columns; start += 64) {
            const int64_t width = std::min<int64_t>(64, columns - start);
            double mean[64] = {}, squares[64] = {};
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) mean[j] += x[i * columns + start + j];
            for (int64_t j = 0; j < width; j++) mean[j] /= rows;
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) {
                    const double d = x[i * columns + start + j] - mean[j];
                    squares[j] += d * d;
                }
            for (int64_t j = 0; j < width; j++) out[start + j] = squares[j] / (rows - 1);
        }""",
    ),
    "cumulative_sum": rowwise("double sum = 0;\nfor (int64_t j = 0; j < columns; j++) to[j] = sum += in[j];"),
    "count_above": rowwise(
        "int64_t count = 0;\nfor (int64_t j = 0; j < columns; j++) count += in[j] > threshold;\n*to = count;",
        out="torch.empty(x.shape[0], dtype=torch.int64)",
        numbers="threshold:float=self.threshold",
        kind="int64_t",
    ),
    "cosine_similarity": rowwise(
        """
        const float* other = b + row * columns;
        double dot = 0, first = 0, second = 0;
        for (int64_t j = 0; j < columns; j++) {
            dot += double(in[j]) * other[j];
            first += double(in[j]) * in[j];
            second += double(other[j]) * other[j];
        }
        *to = dot / (std::max(std::sqrt(first), 1e-8) * std::max(std::sqrt(second), 1e-8));""",
        "a:float=a; b:float=b",
        out="torch.empty(a.shape[0])",
    ),
    "bincount": Native(
        arrays="x:int64_t=x",
        numbers="count:int64_t=x.numel(); bins:int64_t=self.bins",
        out="torch.empty(self.bins, dtype=torch.int64)",
        body="std::fill(out, out + bins, 0);\nfor (int64_t i = 0; i < count; i++) out[x[i]]++;",
        type="int64_t",
    ),
    "vector_norm_float64": rowwise(
        "double sum = 0;\nfor (int64_t j = 0; j < columns; j++) sum += in[j] * in[j];\n*to = std::sqrt(sum);",
        "x:double=x",
        out="torch.empty(x.shape[0], dtype=x.dtype)",
        kind="double",
    ),
    "matmul": product(),
    "transposed_matmul": product(a="a[k * rows + i]", left="a.shape[1]", inner="a.shape[0]"),
    "integer_matmul": product("int64_t"),
    "batched_matmul": Native(
        arrays="a:float=a; b:float=b",
        numbers="batch:int64_t=a.shape[0]; rows:int64_t=a.shape[1]; inner:int64_t=a.shape[2]; "
        "columns:int64_t=b.shape[2]",
        out="torch.empty(a.shape[0], a.shape[1], b.shape[2])",
        body="""
        PARALLEL;
        for (int64_t i = 0; i < batch * rows; i++) {
            const float* right = b + i / rows * inner * columns;
            std::fill(out + i * columns, out + (i + 1) * columns, 0.0f);
            for (int64_t k = 0; k < inner; k++)
                for (int64_t j = 0; j < columns; j++) out[i * columns + j] += a[i * inner + k] * right[k * columns + j];
        }""",
    ),
    "matrix_vector": rowwise(
        "float sum[8] = {};\nint64_t j = 0;\nfor (; j + 8 <= columns; j += 8)\n"
        "    for (int64_t l = 0; l < 8; l++) sum[l] += in[j + l] * v[j + l];\n"
        "for (; j < columns; j++) sum[0] += in[j] * v[j];\nfor (int64_t l = 1; l < 8; l++) sum[0] += sum[l];\n"
        "*to = sum[0];",
        "a:float=a; v:float=v",
        out="torch.empty(a.shape[0])",
    ),
    "diagonal_matmul": rowwise(
        "for (int64_t j = 0; j < columns; j++) to[j] = d[row] * in[j];",
        "b:float=b; d:float=d",
        out="torch.empty_like(b)",
    ),
    "triangular_matmul": rowwise(
        """
        std::fill(to, to + columns, 0.0f);
        for (int64_t k = 0; k <= row; k++)
            for (int64_t j = 0; j <= k; j++) to[j] += in[k] * b[k * columns + j];""",
        "a:float=a; b:float=b",
        out="torch.empty_like(a)",
    ),
    "gram_float64": Native(
        arrays="x:double=x",
        numbers="rows:int64_t=x.shape[0]; columns:int64_t=x.shape[1]",
        out="torch.empty(x.shape[1], x.shape[1], dtype=x.dtype)",
        body="""
        PARALLEL;
        for (int64_t i = 0; i < columns; i++) {
            std::fill(out + i * columns, out + (i + 1) * columns, 0.0);
            for (int64_t k = 0; k < rows; k++)
                for (int64_t j = i; j < columns; j++) out[i * columns + j] += x[k * columns + i] * x[k * columns + j];
        }
        for (int64_t i = 0; i < columns; i++)
            for (int64_t j = 0; j < i; j++) out[i * columns + j] = out[j * columns + i];""",
        type="double",
    ),
    "low_rank": Native(
        arrays="x:float=x; left:float=left; right:float=right",
        numbers="rows:int64_t=x.shape[0]; inner:int64_t=x.shape[1]; rank:int64_t=left.shape[1]; "
        "columns:int64_t=right.shape[1]",
        out="torch.empty(x.shape[0], right.shape[1])",
        body="""
        PARALLEL;
        for (int64_t i = 0; i < rows; i++) {
            std::vector<float> part(rank);
            for (int64_t k = 0; k < inner; k++)
                for (int64_t r = 0; r < rank; r++) part[r] += x[i * inner + k] * left[k * rank + r];
            std::fill(out + i * columns, out + (i + 1) * columns, 0.0f);
            for (int64_t r = 0; r < rank; r++)
                for (int64_t j = 0; j < columns; j++) out[i * columns + j] += part[r] * right[r * columns + j];
        }""",
    ),
    "tridiagonal_matmul": rowwise(
        """
        for (int64_t j = 0; j < columns; j++) to[j] = middle[row] * in[j];
        if (row > 0)
            for (int64_t j = 0; j < columns; j++) to[j] += lower[row - 1] * in[j - columns];
        if (row + 1 < rows)
            for (int64_t j = 0; j < columns; j++) to[j] += upper[row] * in[j + columns];""",
        "b:float=b; lower:float=lower; middle:float=middle; upper:float=upper",
        out="torch.empty_like(b)",
    ),
    "linear_gelu": Native(
        arrays="x:float=x; weight:float=self.linear.weight; bias:float=self.linear.bias",
        numbers="rows:int64_t=x.shape[0]; inner:int64_t=x.shape[1]; columns:int64_t=self.linear.out_features",
        out="torch.empty(x.shape[0], self.linear.out_features)",
        body=f"""
        PARALLEL;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) {{
                const float y = bias[j] + dot(x + i * inner, weight + j * inner, inner);
                out[i * columns + j] = {GELU};
            }}""",
    ),
    "swiglu_mlp": Native(
        arrays="x:float=x; gate:float=gate; up:float=up; down:float=down",
        numbers="rows:int64_t=x.shape[0]; width:int64_t=x.shape[1]; hidden:int64_t=gate.shape[0]",
        out="torch.empty_like(x)",
        body="""
        PARALLEL;
        for (int64_t i = 0; i < rows; i++) {
            std::vector<float> part(hidden);
            for (int64_t h = 0; h < hidden; h++) {
                const float g = dot(x + i * width, gate + h * width, width);
                part[h] = g / (1 + std::exp(-g)) * dot(x + i * width, up + h * width, width);
            }
            for (int64_t j = 0; j < width; j++) out[i * width + j] = dot(part.data(), down + j * hidden, hidden);
        }""",
    ),
    "causal_attention": Native(
        arrays="query:float=query; key:float=key; value:float=value",
        numbers="heads:int64_t=query.shape[0]; length:int64_t=query.shape[1]; width:int64_t=query.shape[2]",
        out="torch.empty_like(query)",
        body="""
        PARALLEL;
        for (int64_t row = 0; row < heads * length; row++) {
            const int64_t start = row / length * length, seen = row - start + 1;
            std::vector<float> scores(seen);
            float top = -INFINITY, sum = 0;
            for (int64_t t = 0; t < seen; t++) {
                scores[t] = dot(query + row * width, key + (start + t) * width, width) / std::sqrt(float(width));
                top = std::max(top, scores[t]);
            }
            for (float& score : scores) sum += score = std::exp(score - top);
            std::fill(out + row * width, out + (row + 1) * width, 0.0f);
            for (int64_t t = 0; t < seen; t++)
                for (int64_t j = 0; j < width; j++)
                    out[row * width + j] += scores[t] / sum * value[(start + t) * width + j];
        }""",
    ),
    "residual_norm_gelu": rowwise(
        NORM.replace("VALUE", "in[j] + residual[row * columns + j]").replace("RESULT", GELU),
        "x:float=x; residual:float=residual; weight:float=weight; bias:float=bias",
    ),
    "cross_entropy": Native(
        arrays="logits:float=logits; targets:int64_t=targets",
        numbers="rows:int64_t=logits.shape[0]; columns:int64_t=logits.shape[1]",
        out="torch.empty(())",
        body="""
        std::vector<double> losses(rows);
        PARALLEL;
        for (int64_t row = 0; row < rows; row++) {
            const float* in = logits + row * columns;
            """
        + textwrap.indent(EXPONENTIALS.strip(), " " * 12).strip()
        + """
            for (int64_t j = 0; j < columns; j++) sum += std::exp(in[j] - top);
            losses[row] = top + std::log(sum) - in[targets[row]];
        }
        double total = 0;
        for (double loss : losses) total += loss;
        *out = total / rows;""",
    ),
    "conv_relu": Native(
        arrays="x:float=x; weight:float=self.convolution.weight; bias:float=self.convolution.bias",
        numbers="batch:int64_t=x.shape[0]; inputs:int64_t=x.shape[1]; outputs:int64_t=self.convolution.out_channels; "
        "height:int64_t=x.shape[2]; width:int64_t=x.shape[3]",
        out="torch.empty(x.shape[0], self.convolution.out_channels, x.shape[2], x.shape[3])",
        body="""
        PARALLEL;
        for (int64_t plane = 0; plane < batch * outputs; plane++) {
            const int64_t n = plane / outputs, o = plane % outputs;
            float* to = out + plane * height * width;
            std::fill(to, to + height * width, bias[o]);
            for (int64_t c = 0; c < inputs; c++)
                for (int64_t u = 0; u < 3; u++)
                    for (int64_t v = 0; v < 3; v++) {
                        const float w = weight[((o * inputs + c) * 3 + u) * 3 + v];
                        for (int64_t i = std::max<int64_t>(0, 1 - u); i < std::min(height, height + 1 - u); i++) {
                            const float* in = x + ((n * inputs + c) * height + i + u - 1) * width + v - 1;
                            for (int64_t j = std::max<int64_t>(0, 1 - v); j < std::min(width, width + 1 - v); j++)
                                to[i * width + j] += w * in[j];
                        }
                    }
            for (int64_t i = 0; i < height * width; i++) to[i] = std::max(to[i], 0.0f);
        }""",
    ),
    "depthwise_conv_silu": Native(
        arrays="x:float=x; weight:float=self.convolution.weight; bias:float=self.convolution.bias",
        numbers="batch:int64_t=x.shape[0]; channels:int64_t=x.shape[1]; length:int64_t=x.shape[2]",
        out="torch.empty_like(x)",
        body="""
        PARALLEL;
        for (int64_t row = 0; row < batch * channels; row++) {
            const float *in = x + row * length, *w = weight + row % channels * 4;
            for (int64_t t = 0; t < length; t++) {
                float y = bias[row % channels];
                for (int64_t lag = 0; lag < 4 && lag <= t; lag++) y += w[3 - lag] * in[t - lag];
                out[row * length + t] = y / (1 + std::exp(-y));
            }
        }""",
    ),
    "gru_cell": Native(
        arrays="x:float=x; state:float=state; weight_ih:float=self.cell.weight_ih; "
        "weight_hh:float=self.cell.weight_hh; bias_ih:float=self.cell.bias_ih; bias_hh:float=self.cell.bias_hh",
        numbers="batch:int64_t=x.shape[0]; inputs:int64_t=x.shape[1]; hidden:int64_t=state.shape[1]",
        out="torch.empty_like(state)",
        body="""
        PARALLEL;
        for (int64_t n = 0; n < batch; n++)
            for (int64_t j = 0; j < hidden; j++) {
                float given[3], kept[3];
                for (int64_t gate = 0; gate < 3; gate++) {
                    const int64_t row = gate * hidden + j;
                    given[gate] = bias_ih[row] + dot(x + n * inputs, weight_ih + row * inputs, inputs);
                    kept[gate] = bias_hh[row] + dot(state + n * hidden, weight_hh + row * hidden, hidden);
                }
                const float reset = 1 / (1 + std::exp(-given[0] - kept[0]));
                const float update = 1 / (1 + std::exp(-given[1] - kept[1]));
                const float fresh = std::tanh(given[2] + reset * kept[2]);
                out[n * hidden + j] = fresh + update * (state[n * hidden + j] - fresh);
            }""",
    ),
    "linear_recurrence": Native(
        arrays="a:float=a; b:float=b",
        numbers="batch:int64_t=a.shape[0]; length:int64_t=a.shape[1]; width:int64_t=a.shape[2]",
        out="torch.empty_like(a)",
        body="""
        PARALLEL;
        for (int64_t n = 0; n < batch; n++)
            for (int64_t t = 0; t < length; t++)
                for (int64_t j = 0; j < width; j++) {
                    const int64_t i = (n * length + t) * width + j;
                    out[i] = (t > 0 ? a[i] * out[i - width] : 0) + b[i];
                }""",
    ),
    "linear_attention": Native(
        arrays="query:float=query; key:float=key; value:float=value",
        numbers="heads:int64_t=query.shape[0]; length:int64_t=query.shape[1]; width:int64_t=query.shape[2]",
        out="torch.empty_like(query)",
        body="""
        const auto feature = [](float x) { return x > 0 ? x + 1 : std::exp(x); };
        PARALLEL;
        for (int64_t head = 0; head < heads; head++) {
            std::vector<double> sums(width), outer(width * width);
            const int64_t start = head * length;
            for (int64_t t = start; t < start + length; t++)
                for (int64_t i = 0; i < width; i++) {
                    const float f = feature(key[t * width + i]);
                    sums[i] += f;
                    for (int64_t j = 0; j < width; j++) outer[i * width + j] += f * value[t * width + j];
                }
            for (int64_t t = start; t < start + length; t++) {
                std::vector<double> row(width);
                double total = 0;
                for (int64_t i = 0; i < width; i++) {
                    const float f = feature(query[t * width + i]);
                    total += f * sums[i];
                    for (int64_t j = 0; j < width; j++) row[j] += f * outer[i * width + j];
                }
                for (int64_t j = 0; j < width; j++) out[t * width + j] = row[j] / total;
            }
        }""",
    ),
}
