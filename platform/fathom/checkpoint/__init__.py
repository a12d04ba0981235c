"""Training state in object storage: one sharded format without pickle, committed by a manifest."""
