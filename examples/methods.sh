#!/usr/bin/env bash
# LoRAP and DiReFTP side by side: each persona by each method at rank 8, on CPU. Takes about 15 minutes on one free core.
#   bash examples/methods.sh                     # writes examples/results/methods.json, and prints its table
#   bash examples/methods.sh lorap direftp       # these methods only
# One seed. The learning rates are the demo's for LoRAP and both (2e-3), and for DiReFTP one that was found good on other data (3e-3;
# 3e-2 diverges there).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
[ $# -gt 0 ] || set -- lorap direftp lorap+direftp
out=runs/methods

for persona in pirate shouty haiku; do
  for method in "$@"; do
    case $method in direftp) rate=3e-3 ;; *) rate=2e-3 ;; esac
    preft train --config examples/demo/preft.yaml --overwrite \
      --set adapter.name="$persona-${method/+/-}" --set adapter.method="$method" --set adapter.rank=8 --set adapter.alpha=16 \
      --set train.file=../personas/$persona/train.jsonl --set eval.file=../personas/$persona/heldout.jsonl \
      --set train.output_dir="../../$out/$persona/$method" --set train.max_steps=20 --set train.learning_rate=$rate \
      --set train.dtype=float32
  done
done
python examples/methods.py $out/*/*/result.json --out examples/results/methods.json --command "bash examples/methods.sh $*"
