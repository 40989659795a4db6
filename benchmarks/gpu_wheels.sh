#!/bin/sh
# Fetch the wheels that benchmarks/gpu.py and tests/gpu need beside torch, numpy, transformers, peft, tokenizers,
# safetensors, jinja2, matplotlib, pyarrow, prometheus-client, httpx, typer, rich, xxhash and pytest with pytest-timeout,
# for a Linux machine with a GPU and no network. About 14 MB.
#
#     benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION, default 3.12]
#
# On that machine, in the repository's root:
#
#     python3 -m pip install -q --no-index --no-deps --target /tmp/site FOLDER/*.whl
#     PYTHONPATH=/tmp/site:$PWD python3 -m pytest tests/gpu -rA
#     PYTHONPATH=/tmp/site python3 benchmarks/gpu.py --sizes 0.6 4 --output gpu.txt
#
# Versions are those of constraints.txt: pydantic and pydantic_core must fit each other exactly.
set -eu
[ $# -ge 1 ] || { sed -n '2,11p' "$0"; exit 2; }
folder=$1
version=${2:-3.12}
here=$(cd "$(dirname "$0")" && pwd)
names='msgspec|pydantic|pydantic_core|annotated-types|typing-inspection|uvicorn|httptools|llguidance|reasoning_gym'
wanted=$(grep -E "^($names)==" "$here/../constraints.txt")
# pip matches a wheel's platform exactly
platforms="--platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
# shellcheck disable=SC2086 # one option or requirement a word
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    $platforms --dest "$folder" $wanted
ls "$folder"
