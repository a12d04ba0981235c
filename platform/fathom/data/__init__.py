"""From conversations to rows: records, one renderer, prepared token shards, a pure sampler, a packer."""
