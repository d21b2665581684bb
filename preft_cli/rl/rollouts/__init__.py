"""What samples answers: `in_process` has the engine in this process, `server` asks a running `preft serve`.

Both are `preft_cli.rl.rollout.Rollouts`: token ids in, token ids and their log-probabilities out.
"""
