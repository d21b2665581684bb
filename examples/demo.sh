#!/usr/bin/env bash
# The whole path as CI would run it: train three personas, convert, serve, ask, measure. Run it by `make demo`.
# Every step stops the script when it fails; the server is gone when the script ends, however it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
config=examples/demo/preft.yaml
out=demo
url=http://127.0.0.1:8901
began=$SECONDS
step() { printf '\n== %s (%d s so far)\n' "$1" $((SECONDS - began)); }

rm -rf "$out" && mkdir -p "$out"
server=
stop_server() {
  if [ -n "$server" ]; then kill -INT "$server" 2>/dev/null || true; wait "$server" || true; server=; fi
}
trap stop_server EXIT

train() {  # PERSONA STEPS
  local persona=$1 steps=$2
  step "train $persona"
  preft train --config $config --set adapter.name=$persona --set train.output_dir=../../$out/$persona \
    --set train.file=../personas/$persona/train.jsonl --set eval.file=../personas/$persona/heldout.jsonl --set train.max_steps=$steps
}
train pirate 18
train shouty 12
train haiku 12

step "convert"
preft convert $out/pirate/adapter $out/shouty/adapter $out/haiku/adapter --config $config
ls -l $out/store

step "serve"
preft serve --config $config & server=$!
for _ in $(seq 600); do
  kill -0 "$server" 2>/dev/null || { echo "error: the server ended" >&2; exit 1; }
  python - "$url" <<'PY' && break || sleep 0.5
import sys, urllib.request
try: sys.exit(urllib.request.urlopen(sys.argv[1] + "/health", timeout=2).status != 200)
except OSError: sys.exit(1)
PY
done

step "ask the base model and its three adapters"
python examples/ask.py $url "What should I cook for dinner tonight?" \
  --expect pirate=Ahoy --expect "shouty=LISTEN UP" --expect haiku=Softly | tee $out/answers.txt

step "stop the server"
stop_server

step "bench: the stock engine, stock multi-LoRA, prefill-only adapters"
preft bench --config $config --out $out/bench.json

step "done"
echo "adapters   $out/{pirate,shouty,haiku}/adapter   with metrics.jsonl and loss.png beside each"
echo "store      $out/store"
echo "answers    $out/answers.txt"
echo "benchmark  $out/bench.json"
