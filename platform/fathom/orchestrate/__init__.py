"""Running on Ray: the local stack, distributed training, jobs on a cluster."""
