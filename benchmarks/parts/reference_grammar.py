"""References by grammar, from integers to matrices: each with other spellings of it, and texts that nearly are it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class DrawnReference:
    """A reference; ``spellings`` are equal to it, ``misses``, by kind, aren't."""

    text: str
    spellings: tuple[str, ...]
    misses: dict[str, str] = field(default_factory=dict)


def integer(rng: random.Random) -> DrawnReference:
    n = rng.choice((-1, 1)) * rng.randint(1000, 10 ** rng.randint(4, 12))
    grouped = f"{n:,}"
    spaced = grouped.replace(",", "\\,")
    misses = {"sign": str(-n), "one more": str(n + 1), "a digit more": f"{n}0", "last group": str(abs(n))[-3:]}
    return DrawnReference(
        text=str(n),
        spellings=(f"${n}$", grouped, spaced, grouped.replace(",", "{,}"), f"{n}.0", f"\\frac{{{2 * n}}}{{2}}"),
        misses={kind: text for kind, text in misses.items() if int(text) != n},
    )


def decimal(rng: random.Random) -> DrawnReference:
    places = rng.randint(1, 9)
    digits = rng.randint(10**places + 1, 10 ** (places + 2))
    digits += digits % 10 == 0
    value = Fraction(digits, 10**places)
    text = f"{digits // 10**places}.{digits % 10**places:0{places}d}"
    further = value * (1 + Fraction(3, 10**6)) + Fraction(2, 10**places)
    beyond = f"{int(further * 10**12) // 10**12}.{int(further * 10**12) % 10**12:012d}"
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return DrawnReference(
        text=text,
        spellings=(f"{text}0", f"${text}$", fraction, f"{digits}\\times10^{{-{places}}}", f"x = {text}"),
        misses={"sign": f"-{text}", "beyond tolerance": beyond, "point": f"{digits}"},
    )


def fraction(rng: random.Random) -> DrawnReference:
    value = Fraction(rng.randint(1, 9999), rng.randint(2, 999))
    value += value.denominator == 1 and Fraction(1, 7)
    a, b = value.numerator, value.denominator
    return DrawnReference(
        text=f"\\frac{{{a}}}{{{b}}}",
        spellings=(
            f"{a}/{b}",
            f"\\dfrac{{{a}}}{{{b}}}",
            f"$\\frac{{{3 * a}}}{{{3 * b}}}$",
            f"{2 * a}/{2 * b}",
            f"y={a}/{b}",
        ),
        misses={"sign": f"-\\frac{{{a}}}{{{b}}}", "turned over": f"\\frac{{{b}}}{{{a}}}", "one more": f"{a + 1}/{b}"},
    )


def mixed(rng: random.Random) -> DrawnReference:
    b = rng.randint(2, 99)
    n, a = rng.randint(1, 999), rng.randint(1, b - 1)
    whole, value = n * b + a, n + Fraction(a, b)
    joined = f"{n}{a}/{b}"
    return DrawnReference(
        text=f"{n} {a}/{b}",
        spellings=(
            f"{n}\\frac{{{a}}}{{{b}}}",
            f"{whole}/{b}",
            f"\\frac{{{whole}}}{{{b}}}",
            f"${n}\\dfrac{{{a}}}{{{b}}}$",
            f"{n} \\tfrac{{{a}}}{{{b}}}",
        ),
        misses={
            "sign": f"-{n} {a}/{b}",
            "joined": joined if Fraction(joined) != value else "0",
            "last number": str(b),
            "fraction": f"{a}/{b}",
        },
    )


def scientific(rng: random.Random) -> DrawnReference:
    a, e = rng.randint(11, 99), rng.choice((-1, 1)) * rng.randint(4, 30)
    head = f"{a // 10}.{a % 10}"
    return DrawnReference(
        text=f"{head}\\times10^{{{e}}}",
        spellings=(
            f"{head} \\times 10^{{{e}}}",
            f"{a}\\times10^{{{e - 1}}}",
            f"{head}\\cdot 10^{{{e}}}",
            f"{head}e{e}",
            f"${head}×10^{{{e}}}$",
        ),
        misses={
            "sign": f"-{head}\\times10^{{{e}}}",
            "exponent": f"{head}\\times10^{{{e + 1}}}",
            "digits": f"{a + 1}\\times10^{{{e - 1}}}",
        },
    )


def percent(rng: random.Random) -> DrawnReference:
    n = rng.randint(1, 999)
    return DrawnReference(
        text=f"{n}\\%",
        spellings=(f"{n}%", f"${n}\\%$", f"\\frac{{{n}}}{{100}}", f"{n}/100", f"{n} percent"),
        misses={"sign": f"-{n}\\%", "one more": f"{n + 1}\\%", "unit": str(n), "point": f"{n}0%"},
    )


def repeating(rng: random.Random) -> DrawnReference:
    n, d = rng.randint(0, 99), rng.randint(1, 8)
    value = n + Fraction(d, 9)
    return DrawnReference(
        text=f"{n}.\\overline{{{d}}}",
        spellings=(
            f"{value.numerator}/{value.denominator}",
            f"${n}.\\overline{{{d}}}$",
            f"{n}.({d})",
            f"{n}.{d}\\overline{{{d}}}",
            f"{n}.\\dot{{{d}}}",
        ),
        misses={
            "cut": f"{n}.{d}",
            "one more": f"{n}.\\overline{{{d + 1}}}" if d < 8 else f"{n}.8",
            "sign": f"-{n}.\\overline{{{d}}}",
        },
    )


def surd(rng: random.Random) -> DrawnReference:
    a, b, c = (
        rng.randint(1, 60),
        rng.randint(2, 40),
        rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23)),
    )
    return DrawnReference(
        text=f"{a}+{b}\\sqrt{{{c}}}",
        spellings=(
            f"{b}\\sqrt{{{c}}}+{a}",
            f"{a}+\\sqrt{{{b * b * c}}}",
            f"${a} + {b} \\sqrt{{{c}}}$",
            f"{a}+{b}√{c}",
            f"\\frac{{{2 * a}+{2 * b}\\sqrt{{{c}}}}}{{2}}",
        ),
        misses={
            "sign": f"{a}-{b}\\sqrt{{{c}}}",
            "one more": f"{a}+{b}\\sqrt{{{c + 1}}}",
            "without": f"{a}+{b}",
            "one entry": f"{a + 1}+{b}\\sqrt{{{c}}}",
        },
    )


def polynomial(rng: random.Random) -> DrawnReference:
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    x, y = rng.choice((("x", "y"), ("t", "s"), ("n", "m")))
    text = f"{a}{x}^2+{b}{x}-{c}"
    return DrawnReference(
        text=text,
        spellings=(
            f"{b}{x}+{a}{x}^2-{c}",
            f"{a}{x}^{{2}} + {b}{x} - {c}",
            f"${text}$",
            f"{x}({a}{x}+{b})-{c}",
            f"{a}{x}²+{b}{x}−{c}",
        ),
        misses={
            "sign": f"{a}{x}^2+{b}{x}+{c}",
            "one entry": f"{a}{x}^2+{b + 1}{x}-{c}",
            "variable": text.replace(x, y),
            "degree": f"{a}{x}^3+{b}{x}-{c}",
        },
    )


def base(rng: random.Random) -> DrawnReference:
    of = rng.choice((2, 3, 5, 7, 8, 9))
    digits = "1" + "".join(str(rng.randrange(of)) for _ in range(rng.randint(2, 6)))
    return DrawnReference(
        text=f"{digits}_{of}",
        spellings=(
            f"{digits}_{{{of}}}",
            f"${digits}_{of}$",
            f"{digits}_{{\\text{{{of}}}}}",
            f"{digits} _{{{of}}}",
            f"\\({digits}_{of}\\)",
        ),
        misses={
            "base": f"{digits}_{{{of + 1}}}",
            "one entry": f"{digits[:-1]}{(int(digits[-1]) + 1) % of}_{of}",
            "bare": digits,
        },
    )


def time_of_day(rng: random.Random) -> DrawnReference:
    h, m = rng.randint(1, 11), rng.randint(0, 59)
    return DrawnReference(
        text=f"{h}:{m:02d} PM",
        spellings=(
            f"{h}:{m:02d} pm",
            f"{h}:{m:02d}PM",
            f"{h}:{m:02d} p.m.",
            f"{h + 12}:{m:02d}",
            f"{h}:{m:02d}\\text{{ PM}}",
        ),
        misses={"half": f"{h}:{m:02d} AM", "one entry": f"{h}:{(m + 1) % 60:02d} PM", "last number": str(m)},
    )


def date(rng: random.Random) -> DrawnReference:
    months = ("January", "February", "March", "April", "June", "July", "August", "September", "October", "November")
    y, m, d = rng.randint(1900, 2099), rng.randrange(10), rng.randint(1, 28)
    number = m + 1 + (m > 3)
    return DrawnReference(
        text=f"{months[m]} {d}, {y}",
        spellings=(
            f"{d} {months[m]} {y}",
            f"{months[m][:3]} {d}, {y}",
            f"{y}-{number:02d}-{d:02d}",
            f"{months[m]} {d} {y}",
            f"\\text{{{months[m]} {d}, {y}}}",
        ),
        misses={
            "day": f"{months[m]} {d + 1}, {y}",
            "year": f"{months[m]} {d}, {y + 1}",
            "month": f"{months[m - 1]} {d}, {y}",
            "last number": str(y),
        },
    )


def quantity(rng: random.Random) -> DrawnReference:
    n = rng.randint(2, 9999)
    unit, other = rng.choice(
        (
            ("cm", "km"),
            ("kg", "mg"),
            ("dollars", "euros"),
            ("books", "pens"),
            ("cm^2", "cm^3"),
            ("m/s", "km/h"),
            ("hours", "minutes"),
            ("zorgs", "blips"),
        )
    )
    set_unit = "\\text{ cm}^2" if unit == "cm^2" else f"\\text{{ {unit}}}"
    return DrawnReference(
        text=f"{n} {unit}",
        spellings=(str(n), f"{n}{set_unit}", f"${n}$ {unit}", f"{n}.0 {unit}", f"{n}\\ {set_unit}"),
        misses={"unit": f"{n} {other}", "sign": f"-{n} {unit}", "one more": f"{n + 1} {unit}"},
    )


def _entries(rng: random.Random, count: int) -> list[str]:
    numbers = rng.sample(range(-999, 999), count)
    return [str(n) if rng.random() < 0.7 else f"\\frac{{{2 * n + 1}}}{{2}}" for n in numbers]


def finite_set(rng: random.Random) -> DrawnReference:
    one = _entries(rng, rng.randint(2, 5))
    inside, turned = ", ".join(one), ",".join(reversed(one))
    return DrawnReference(
        text=f"\\{{{inside}\\}}",
        spellings=(
            f"\\{{{turned}\\}}",
            f"$\\{{ {inside} \\}}$",
            f"\\left\\{{{inside}\\right\\}}",
            f"\\lbrace {inside} \\rbrace",
            f"\\{{{inside.replace('frac', 'dfrac')}\\}}",
        ),
        misses={
            "one entry": f"\\{{{', '.join([*one[:-1], '1000'])}\\}}",
            "one less": f"\\{{{', '.join(one[1:])}\\}}",
            "brackets": f"({inside})",
            "last number": one[-1],
        },
    )


def ordered_tuple(rng: random.Random) -> DrawnReference:
    one = _entries(rng, rng.randint(2, 4))
    inside = ", ".join(one)
    return DrawnReference(
        text=f"({inside})",
        spellings=(
            f"({','.join(one)})",
            f"$({inside})$",
            f"\\left({inside}\\right)",
            f"( {inside} )",
            f"({inside.replace('frac', 'tfrac')})",
        ),
        misses={
            "order": f"({', '.join(reversed(one))})",
            "one entry": f"({', '.join([*one[:-1], '1000'])})",
            "end": f"[{inside}]",
            "last number": one[-1],
        },
    )


def interval(rng: random.Random) -> DrawnReference:
    low = rng.randint(-999, 900)
    high = low + rng.randint(1, 99)
    return DrawnReference(
        text=f"[{low}, {high})",
        spellings=(
            f"[{low},{high})",
            f"{low} \\le x < {high}",
            f"x \\in [{low},{high})",
            f"\\left[{low}, {high}\\right)",
            f"{high} > x \\geq {low}",
        ),
        misses={
            "open or closed end": f"[{low}, {high}]",
            "other end": f"({low}, {high})",
            "one entry": f"[{low}, {high + 1})",
            "last number": str(high),
        },
    )


def ray(rng: random.Random) -> DrawnReference:
    n = rng.randint(-9999, 9999)
    return DrawnReference(
        text=f"x > {n}",
        spellings=(f"({n}, \\infty)", f"x>{n}", f"{n} < x", f"$x \\in ({n}, \\infty)$", f"({n},∞)"),
        misses={
            "open or closed end": f"x \\ge {n}",
            "direction": f"x < {n}",
            "one entry": f"x > {n + 1}",
            "last number": str(n),
        },
    )


def matrix(rng: random.Random) -> DrawnReference:
    rows = [_entries(rng, 2) for _ in range(rng.randint(1, 3))]

    def written(rows: list[list[str]], name: str = "pmatrix", gap: str = " ") -> str:
        body = f"{gap}\\\\{gap}".join(f"{gap}&{gap}".join(row) for row in rows)
        return f"\\begin{{{name}}}{gap}{body}{gap}\\end{{{name}}}"

    changed = [*rows[:-1], [rows[-1][0], "1000"]]
    array = written(rows, "array").replace("{array}", "{array}{cc}", 1)
    return DrawnReference(
        text=written(rows),
        spellings=(
            written(rows, gap=""),
            written(rows, "bmatrix"),
            f"$${written(rows)}$$",
            f"\\left({array}\\right)",
            written(rows).replace("frac", "dfrac"),
        ),
        misses={
            "one entry": written(changed),
            "order": written([row[::-1] for row in rows]),
            "last number": rows[-1][-1],
            "one less": written([row[:1] for row in rows]),
        },
    )


_ALL = (integer, decimal, fraction, mixed, scientific, percent, repeating, surd, polynomial, base, time_of_day, date)
KINDS: dict[str, Callable[[random.Random], DrawnReference]] = {
    one.__name__: one for one in (*_ALL, quantity, finite_set, ordered_tuple, interval, ray, matrix)
}
# of 100: 60 integers, 20 fractions and decimals, 10 surds and polynomials, 10 sets, intervals, matrices
_SHARES = (
    (60, (integer,)),
    (20, (decimal, fraction, mixed, scientific)),
    (10, (surd, polynomial)),
    (10, (finite_set, interval, ordered_tuple, matrix)),
)


def distinct_references(count: int, seed: int) -> Iterator[str]:
    """``count`` different references in the shares of `_SHARES`."""
    rng, seen = random.Random(seed), set[str]()
    for share, kinds in _SHARES:
        wanted = count * share // 100
        while wanted:
            text = rng.choice(kinds)(rng).text
            if text not in seen:
                seen.add(text)
                wanted -= 1
                yield text
