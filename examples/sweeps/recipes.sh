#!/usr/bin/env bash
# Which modules, and which scale, suit an adapter on the prompt only: LoRAP on definitions of WordNet with LoRA on all linear layers,
# on attention alone, or on the MLP alone, by rank, scaled by alpha / rank or alpha / sqrt(rank); three seeds, and for each the
# learning rate with the lowest mean loss on validation rows. 135 runs of one epoch; for a GPU. First run examples/sweeps/wordnet.sh,
# which makes the data.
#   bash examples/sweeps/recipes.sh               # writes examples/results/sweep-recipes.json, .csv and .png, prints the table
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

preft train --config examples/sweeps/wordnet.yaml --set train.output_dir=../../runs/sweeps/recipes \
  --sweep adapter.target_modules="${MODULES:-all-linear,[q_proj,k_proj,v_proj,o_proj],[gate_proj,up_proj,down_proj]}" \
  --sweep adapter.rank:adapter.alpha:adapter.use_rslora="${SCALES:-8:16:false,8:16:true,64:16:false,64:16:true,64:128:false}" \
  --sweep train.learning_rate="${RATES:-1e-3,3e-3,1e-2}" --choose train.learning_rate \
  --sweep project.seed="${SEEDS:-0,1,2}" \
  --jobs "${JOBS:-8}" --out "${OUT:-examples/results/sweep-recipes.json}" "$@"
