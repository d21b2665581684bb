#!/usr/bin/env bash
# LoRAP, DiReFTP and LoRA side by side on one task of reasoning-gym, three seeds: accuracy before and after, curves, a table.
#
#   bash examples/rl/reasoning.sh letter_counting --jobs 3 --set serve.gpu_memory_utilization=0.2     (one GPU)
#   METHODS=lorap SEEDS=0 bash examples/rl/reasoning.sh gcd --set train.max_steps=5                   (a look on a CPU)
#
# Runs, table and picture lie in runs/TASK. Further arguments are options of preft train.
set -euo pipefail
task=${1:?usage: bash examples/rl/reasoning.sh TASK [options of preft train]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case $task in
  word_sequence_reversal) args='{min_words: 2, max_words: 3}' ;;
  *) args='{}' ;;
esac
exec preft train --config "$here/reasoning.yaml" --set train.grpo.environment="$task" --set train.grpo.environment_args="$args" \
  --set train.output_dir="$PWD/runs/$task" --sweep adapter.method:train.learning_rate="${METHODS:-lorap:1e-3,direftp:2e-3,lora:5e-4}" \
  --sweep project.seed="${SEEDS:-0,1,2}" --out "$PWD/runs/$task.json" "$@"
