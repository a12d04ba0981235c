"""Sharding strategies: one small protocol, a one-process reference, FSDP2 and DeepSpeed ZeRO."""
