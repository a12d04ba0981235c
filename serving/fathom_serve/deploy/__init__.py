"""The Ray Serve application: an ingress that validates and streams, and engine replicas."""
