#!/usr/bin/env bash
# Held-out loss over rank on the pirate's conversations: LoRAP, LoRA and DiReFTP by ranks 4 and 16, one seed, on CPU.
# About 4 minutes on two cores.
#   bash examples/sweeps/personas.sh              # writes examples/results/sweep-personas.json, .csv and .png, prints the table
#   bash examples/sweeps/personas.sh --resume     # goes on after Ctrl-C; other options of preft train go the same way
# The learning rates are those of examples/methods.sh; alpha moves with the rank, so that the scale alpha / rank stays at 2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

preft train --config examples/sweeps/personas.yaml \
  --sweep adapter.method:train.learning_rate=lorap:2e-3,lora:2e-3,direftp:3e-3 \
  --sweep adapter.rank:adapter.alpha=4:8,16:32 \
  --jobs 2 --out "${OUT:-examples/results/sweep-personas.json}" "$@"
