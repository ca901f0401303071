"""The operator's page: what the coordinator does, read-only, beside the run and never in its way."""
