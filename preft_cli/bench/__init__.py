"""Throughput of arms on the same requests: plan, workload, one fresh process an arm, result, table."""
