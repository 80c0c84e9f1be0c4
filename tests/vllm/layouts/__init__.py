"""The KV of models that no CPU runs, laid out by vLLM, through the connector's halves."""
